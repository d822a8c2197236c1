"""The hooks of plugins zero1, zero2 and zero3. Imports of torch wait until a run needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError, suggest
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.mesh import Mesh
    from femto_core.sharding import ShardingStrategy


@attrs.frozen(kw_only=True)
class ZeroSection:
    """Sharding over data parallel ranks: stages 1 and 2."""

    axes: tuple[str, ...] = ("dp",)
    """Mesh axes over whose ranks to shard; gradients are summed over the other data axes (hybrid sharding)."""
    bucket_mib: float = attrs.field(default=10.0, validator=positive)
    """MiB of parameters that are reduced, and gathered, at a time."""


@attrs.frozen(kw_only=True)
class Zero3Section:
    """Sharding over data parallel ranks: stage 3."""

    axes: tuple[str, ...] = ("dp",)
    """Mesh axes over whose ranks to shard; gradients are summed over the other data axes (hybrid sharding)."""
    prefetch: int = attrs.field(default=1, validator=not_negative)
    """How many units to gather ahead of the one that computes."""
    reshard_after_forward: bool = True
    """Drop a unit's weights after forward and gather them again for backward; otherwise keep them in between."""
    reduce_every_micro_batch: bool = True
    """Reduce gradients to shards after each backward; otherwise full gradients add up, and are reduced once a step."""


class Zero1:
    """Takes the sharding seat with stage 1."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[ZeroSection]]:
        return "zero", ZeroSection

    @hookimpl
    def femto_sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        return _whole_weights(config, mesh, every_micro_batch=False)


class Zero2:
    """Takes the sharding seat with stage 2."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[ZeroSection]]:
        return "zero", ZeroSection

    @hookimpl
    def femto_sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        return _whole_weights(config, mesh, every_micro_batch=True)


class Zero3:
    """Takes the sharding seat with stage 3."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[Zero3Section]]:
        return "zero", Zero3Section

    @hookimpl
    def femto_sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        from femto_zero.sharded import ShardedWeights

        section = config.section(Zero3Section)
        check_axes(mesh, section.axes)
        return ShardedWeights(
            mesh,
            section.axes,
            every_micro_batch=section.reduce_every_micro_batch,
            prefetch=section.prefetch,
            reshard_after_forward=section.reshard_after_forward,
        )


def _whole_weights(config: Config, mesh: Mesh, *, every_micro_batch: bool) -> ShardingStrategy:
    from femto_zero.whole import WholeWeights

    section = config.section(ZeroSection)
    check_axes(mesh, section.axes)
    return WholeWeights(mesh, section.axes, every_micro_batch=every_micro_batch, bucket_mib=section.bucket_mib)


def check_axes(mesh: Mesh, axes: Sequence[str]) -> None:
    """Refuse axes that replicate no weights along batches; say so where they hold one rank only."""
    for axis in axes:
        if axis not in mesh.data_axes:
            raise UserError(
                f"zero.axes = {axis!r} is no mesh axis that splits rows or tokens{suggest(axis, mesh.data_axes)}; "
                f"ZeRO shards over {', '.join(mesh.data_axes)}"
            )
    if len(set(axes)) < max(1, len(axes)):
        raise UserError("zero.axes must name at least one mesh axis, and each once")
    if mesh.size(*axes) == 1 and mesh.rank == 0:
        print(f"zero: one rank along {', '.join(axes)}: nothing is sharded", file=sys.stderr, flush=True)
