"""The settings of a pipeline, and the placement that they ask for."""

from __future__ import annotations

import attrs

from femto_core.errors import UserError, suggest
from femto_core.sections import not_negative, positive
from femto_pp.placement import Placement
from femto_pp.schedules import SCHEDULES


@attrs.frozen(kw_only=True)
class PPSection:
    """The model cut into chunks of layers, through which micro-batches flow from rank to rank."""

    size: int = attrs.field(default=2, validator=positive)
    """Ranks of a pipeline."""
    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zb, or one that a plugin registers."""
    chunks: int = attrs.field(default=0, validator=not_negative)
    """Chunks of each rank; 0: the fewest that the schedule allows."""
    layers: str = "even"
    """Layers of each chunk: even, balanced (the head counts), or numbers from embedding to head, such as 3,3,2."""


def chunks_of(section: PPSection) -> int:
    """Return the number of chunks of each rank. Raises `UserError` for an unknown schedule or a number it forbids."""
    found = SCHEDULES.get(section.schedule)
    if found is None:
        raise UserError(
            f"pp.schedule = {section.schedule!r} is no schedule{suggest(section.schedule, SCHEDULES)} "
            f"(schedules: {', '.join(SCHEDULES)})"
        )
    chunks = section.chunks or found.least_chunks
    if not found.least_chunks <= chunks <= found.most_chunks:
        allowed = str(found.least_chunks)
        if found.most_chunks != found.least_chunks:
            allowed += f" to {found.most_chunks}"
        raise UserError(f"pp.chunks = {chunks}: schedule {section.schedule} takes {allowed} for each rank")
    return chunks


def placement_of(section: PPSection) -> Placement:
    """Return the schedule's placement. Raises `UserError` like `chunks_of`, ValueError if it has the wrong size."""
    chunks = chunks_of(section)
    placement = SCHEDULES[section.schedule].placement(section.size, chunks)
    if (placement.size, placement.chunks) != (section.size, chunks):
        raise ValueError(
            f"schedule {section.schedule} places {placement.chunks} chunks on each of {placement.size} ranks "
            f"instead of {chunks} on each of {section.size}"
        )
    return placement
