"""The hooks of plugin pp. A process that never trains does not import torch for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl
from femto_pp.schedules import SCHEDULES
from femto_pp.section import PPSection, chunks_of, placement_of

if TYPE_CHECKING:
    from femto_core.commands import CommandRegistry
    from femto_core.config import Config
    from femto_core.mesh import Axis, Mesh
    from femto_core.model import Stage
    from femto_core.schedule import Schedule

ORDER = 10
"""The outermost axis: pipeline neighbours send the least, so they may be on different machines."""


class PipelineParallelism:
    """Adds the axis pp and takes the schedule seat."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[PPSection]]:
        return "pp", PPSection

    @hookimpl
    def femto_commands(self, registry: CommandRegistry) -> None:
        from femto_pp.draw import DrawOptions, draw

        registry.add("pp-draw", "draw a pipeline schedule's timeline", DrawOptions, draw)

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        chunks_of(config.section(PPSection))

    @hookimpl
    def femto_mesh_axes(self, config: Config) -> Sequence[Axis]:
        from femto_core.mesh import Axis

        return [Axis("pp", config.section(PPSection).size, ORDER, "nothing")]

    @hookimpl
    def femto_schedule(self, config: Config, mesh: Mesh) -> Schedule:
        from femto_pp.pipeline import Pipeline

        section = config.section(PPSection)
        return Pipeline(mesh, placement_of(section), SCHEDULES[section.schedule], section.layers)

    @hookimpl
    def femto_parallelize(self, stage: Stage, config: Config) -> None:
        from femto_pp.linear import split_linears

        if SCHEDULES[config.section(PPSection).schedule].splits_backward:
            split_linears(stage)
