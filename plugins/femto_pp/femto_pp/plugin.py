"""The hooks of plugin pp. Imports of torch wait until a run needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError, suggest
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive

if TYPE_CHECKING:
    from femto_core.cli import CommandRegistry
    from femto_core.config import Config
    from femto_core.mesh import Axis, Mesh
    from femto_core.model import Stage
    from femto_core.schedule import Schedule

ORDER = 10
"""Outermost: neighbours in a pipeline talk least, and may lie on different machines."""


@attrs.frozen(kw_only=True)
class PPSection:
    """The model cut into stages, through which micro-batches flow."""

    size: int = attrs.field(default=2, validator=positive)
    """Ranks of a pipeline."""
    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zb, or one that a plugin registers."""
    chunks: int = attrs.field(default=0, validator=not_negative)
    """Stages of each rank; 0: the least that the schedule needs."""
    layers: str = "even"
    """Layers of each stage: even, balanced (the head counts), or numbers in the stages' order, such as 3,3,2."""


class PipelineParallelism:
    """Adds the axis pp and takes the schedule seat."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[PPSection]]:
        return "pp", PPSection

    @hookimpl
    def femto_commands(self, registry: CommandRegistry) -> None:
        registry.add("pp-draw", "draw a pipeline schedule's timeline", draw_command)

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        chunks_of(config.section(PPSection))

    @hookimpl
    def femto_mesh_axes(self, config: Config) -> Sequence[Axis]:
        from femto_core.mesh import Axis

        return [Axis("pp", config.section(PPSection).size, ORDER)]

    @hookimpl
    def femto_schedule(self, config: Config, mesh: Mesh) -> Schedule:
        from femto_pp.pipeline import Pipeline
        from femto_pp.placement import Placement
        from femto_pp.schedules import SCHEDULES

        section = config.section(PPSection)
        placement = Placement(section.size, chunks_of(section))
        return Pipeline(mesh, placement, SCHEDULES[section.schedule], section.layers)

    @hookimpl
    def femto_parallelize(self, stage: Stage, mesh: Mesh, config: Config) -> None:
        import torch

        from femto_pp.linear import split_linears
        from femto_pp.schedules import SCHEDULES

        if SCHEDULES[config.section(PPSection).schedule].splits_backward:
            split_linears(stage)
        # Layers at the same place of two stages would otherwise drop out alike: each stage draws its own numbers.
        torch.manual_seed(torch.initial_seed() + 104_729 * mesh.coordinate("pp"))


def chunks_of(section: PPSection) -> int:
    """Return how many stages each rank has. Raises `UserError` for a schedule unknown, or one that wants another."""
    from femto_pp.schedules import SCHEDULES

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


def draw_command(words: Sequence[str]) -> int:
    """`femto pp-draw [--schedule NAME] [--size N] [--micro-batches N] [--chunks N] [--output FILE.png]`."""
    from femto_pp.draw import draw

    return draw(words)
