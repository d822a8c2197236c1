"""The hooks of plugins zero1, zero2 and zero3. Imports of torch wait until a run needs them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs

from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.mesh import Mesh
    from femto_core.sharding import ShardingStrategy
    from femto_core.sync import GradientSynchronizer


@attrs.frozen(kw_only=True)
class ZeroSection:
    """Sharding over data parallel ranks: stages 1 and 2."""

    bucket_mib: float = attrs.field(default=10.0, validator=positive)
    """MiB of parameters that are reduced, and gathered, at a time."""


@attrs.frozen(kw_only=True)
class Zero3Section:
    """Sharding over data parallel ranks: stage 3."""

    prefetch: int = attrs.field(default=1, validator=not_negative)
    """How many units to gather ahead of the one that computes."""
    reshard_after_forward: bool = True
    """Drop a unit's weights after forward and gather them again for backward; otherwise keep them in between."""
    reduce_every_micro_batch: bool = True
    """Reduce gradients to shards after each backward; otherwise full gradients add up, and are reduced once a step."""


class _Stage:
    """What the stages' plugins have in common."""

    @hookimpl
    def femto_grad_sync(self, sharding: ShardingStrategy) -> GradientSynchronizer:
        return sharding  # type: ignore[return-value] # the kernel asks with the strategy from this plugin's own seat


class Zero1(_Stage):
    """Takes the seats of sharding and gradient synchronisation with stage 1."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[ZeroSection]]:
        return "zero", ZeroSection

    @hookimpl
    def femto_sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        return _whole_weights(config, mesh, every_micro_batch=False)


class Zero2(_Stage):
    """Takes the seats of sharding and gradient synchronisation with stage 2."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[ZeroSection]]:
        return "zero", ZeroSection

    @hookimpl
    def femto_sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        return _whole_weights(config, mesh, every_micro_batch=True)


class Zero3(_Stage):
    """Takes the seats of sharding and gradient synchronisation with stage 3."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[Zero3Section]]:
        return "zero", Zero3Section

    @hookimpl
    def femto_sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        from femto_zero.sharded import ShardedWeights

        _say_if_alone(mesh)
        section = config.section(Zero3Section)
        return ShardedWeights(
            mesh,
            every_micro_batch=section.reduce_every_micro_batch,
            prefetch=section.prefetch,
            reshard_after_forward=section.reshard_after_forward,
        )


def _whole_weights(config: Config, mesh: Mesh, *, every_micro_batch: bool) -> ShardingStrategy:
    from femto_zero.whole import WholeWeights

    _say_if_alone(mesh)
    bucket_mib = config.section(ZeroSection).bucket_mib
    return WholeWeights(mesh, every_micro_batch=every_micro_batch, bucket_mib=bucket_mib)


def _say_if_alone(mesh: Mesh) -> None:
    if mesh.size("dp") == 1 and mesh.rank == 0:
        print("zero: one data parallel rank: nothing is sharded", file=sys.stderr, flush=True)
