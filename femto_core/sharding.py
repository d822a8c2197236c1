"""The sharding seat: who keeps, updates and gathers which part of the weights."""

from __future__ import annotations

from typing import Protocol

import torch

from femto_core.model import Stage
from femto_core.precision import MixedPrecisionManager, ParamGroup


class ShardingStrategy(Protocol):
    """The four moments at which sharding steps into training, and its end."""

    def make_master(self, stage: Stage, precision: MixedPrecisionManager) -> list[ParamGroup]:
        """Give the stage, which is on the meta device, its memory; return what this rank owns of each parameter.

        The groups' layouts say which part that is. Values are loaded into the masters afterwards.
        """

    def reduce_grads(self) -> None:
        """After the last backward: have the summed gradient of every owned part in its `compute.grad`."""

    def gather_weights(self) -> None:
        """After owned parts have new values: make the stage's parameters whole again where others own the rest."""

    def post_step(self) -> None:
        """Release what only this step needed."""

    def close(self) -> None:
        """Undo what was attached to the stage."""


class Replicated:
    """No sharding: every rank keeps and updates all of its stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make_master(self, stage: Stage, precision: MixedPrecisionManager) -> list[ParamGroup]:
        stage.allocate(self._device, lambda name: precision.dtype_of(name, stage))
        return [precision.make_group(name, p, stage.layouts[name]) for name, p in stage.named_parameters()]

    def reduce_grads(self) -> None:
        pass

    def gather_weights(self) -> None:
        pass

    def post_step(self) -> None:
        pass

    def close(self) -> None:
        pass
