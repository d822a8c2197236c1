"""A pipeline in the shape of a V (Qi et al. 2024, arXiv:2405.15362): the first rank embeds, and has the head too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from femto_core.hookspecs import hookimpl
from femto_pp.placement import Placement
from femto_pp.schedules import Order, list_schedule, schedule


def v_shape(size: int, chunks: int) -> Placement:
    """Return the placement in which rank r holds virtual stages r and 2 size - 1 - r."""
    return Placement(tuple((rank, 2 * size - 1 - rank) for rank in range(size)))


@schedule("v-zero-bubble", splits_backward=True, least_chunks=2, most_chunks=2, placement=v_shape)
def v_schedule(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """Split backwards; at most 2 size chunk forwards of a rank wait for their backward."""
    return list_schedule(micro_batches, placement, lambda rank: 2 * placement.size, held=placement.size)


class VSchedule:
    """The plugin."""

    @hookimpl
    def femto_config_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"pp": {"schedule": "v-zero-bubble"}}
