"""The schedule seat: cuts the model into this rank's stage and runs a step's micro-batches through it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from femto_core.batch import Batch
from femto_core.loss import BatchLoss
from femto_core.mesh import Mesh
from femto_core.model import FullModel, Stage
from femto_core.sharding import ShardingStrategy


class Schedule(Protocol):
    """Every rank of a pipeline returns the same results, whichever of them holds the head."""

    def partition(self, model: FullModel) -> Stage:
        """Return this rank's stage, still on the meta device."""

    def run(
        self,
        stage: Stage,
        micro_batches: Sequence[Batch],
        loss: BatchLoss,
        scale: torch.Tensor,
        sharding: ShardingStrategy,
    ) -> torch.Tensor:
        """Run forward and backward of all micro-batches; gradients add up to those of `scale` times the summed loss.

        The stage's side losses are part of the loss. All backwards but the stage's last run inside
        `sharding.no_sync()`. Returns the summed loss (float64 scalar) of the tokens that this rank sees.
        """

    def forward(
        self, stage: Stage, batch: Batch, then: Callable[[torch.Tensor, nn.Module], torch.Tensor]
    ) -> torch.Tensor:
        """Return `then(hidden [b, s, h], head)` for one batch, without gradients: for evaluation and sampling."""

    def in_flight(self, micro_batches: int) -> int:
        """Return how many of a step's micro-batches may be between forward and backward here at a time."""

    def close(self) -> None:
        """End what runs beside the steps."""


class Sequential:
    """One stage holds the whole model; micro-batches follow one another."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def partition(self, model: FullModel) -> Stage:
        everywhere = frozenset(axis.name for axis in self._mesh.axes)
        return Stage(model, [range(model.config.num_hidden_layers)], self._mesh, everywhere)

    def run(
        self,
        stage: Stage,
        micro_batches: Sequence[Batch],
        loss: BatchLoss,
        scale: torch.Tensor,
        sharding: ShardingStrategy,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for number, micro_batch in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            with contextlib.nullcontext() if is_last else sharding.no_sync():
                batch = micro_batch.to(self._mesh.device)
                hidden = stage.forward(batch.input_ids, batch)
                side = stage.side_losses.take()
                loss_sum = loss(hidden, stage.head, batch)
                loss_sum = loss_sum if side is None else loss_sum + side
                (loss_sum * scale).backward()  # type: ignore[no-untyped-call]
                total += loss_sum.detach()
        return total

    @torch.no_grad()
    def forward(
        self, stage: Stage, batch: Batch, then: Callable[[torch.Tensor, nn.Module], torch.Tensor]
    ) -> torch.Tensor:
        batch = batch.to(self._mesh.device)
        return then(stage.forward(batch.input_ids, batch), stage.head)

    def in_flight(self, micro_batches: int) -> int:
        return 1

    def close(self) -> None:
        pass
