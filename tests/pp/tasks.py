"""Shared by the tests of pipelines: settings, data and models that are hard to pipeline, third-party schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from femto_core.batch import Batch
from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel
from femto_core.trainer import Trainer
from femto_pp.actions import Backward, Compute, Forward, WeightBackward
from femto_pp.pipeline import Pipeline
from femto_pp.placement import Placement
from femto_pp.schedules import SCHEDULES, Order, Orders, list_schedule, schedule
from femto_tools.testing import RandomRows, RandomTask, make_trainer, train_job
from tests.conftest import read_flat
from tests.merging import Values as Values
from tests.merging import merged as merged

NAMES = ("gpipe", "1f1b", "interleaved", "zb")
BOUND = 1e-9
SMALL_BUCKETS: Values = {"zero": {"bucket_mib": 0.002}}
ZERO: dict[str, Values] = {"": {}, "zero1": SMALL_BUCKETS, "zero2": SMALL_BUCKETS, "zero3": {}}
BASE: Values = {"train": {"steps": 3}, "model": {"layers": 4}}


def pipeline(name: str, size: int = 2, **section: Any) -> Values:
    """Return the settings of a pipeline."""
    return {"pp": {"size": size, "schedule": name, **section}}


def pipeline_of(trainer: Trainer) -> Pipeline:
    """Return a trainer's executor."""
    assert isinstance(trainer.schedule, Pipeline)
    return trainer.schedule


# Data and models.


@attrs.frozen
class UnequalRows(RandomRows):
    """Rows of 3 to 13 tokens."""

    def __getitem__(self, index: int) -> Batch:
        longest = attrs.evolve(super().__getitem__(index))
        length = 3 + (5 * index) % 11
        return longest.tokens(torch.arange(length))


class UnequalTask(RandomTask):
    """Micro-batches of one row each, which differ in length."""

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        return UnequalRows(self, 13, config.model.vocab_size, {"train": 0, "held_out": 1}[split])


@attrs.frozen
class FrozenTask(RandomTask):
    """Parameters whose name contains one of `frozen` are not trained."""

    frozen: tuple[str, ...] = ()

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))


class PlainLinear(nn.Linear):
    """A linear layer that cannot defer its weight gradient. Being a subclass, it does not count as a plain one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class UnsplittableTask(RandomTask):
    """One linear layer of each decoder layer is of a class whose backward cannot be split."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for number, layer in enumerate(model.module.model.layers):
            (layer.mlp.down_proj if number % 2 else layer.self_attn.q_proj).__class__ = PlainLinear


# Third-party schedules.


def hesitant(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """All forwards, then all backwards, then all weight gradients in reverse order, over any number of chunks."""
    order: list[Compute] = []
    for kind in (Forward, Backward, WeightBackward):
        chunks = range(placement.chunks)
        for c in chunks if kind is Forward else reversed(chunks):
            numbers = range(micro_batches)
            order += [kind(m, c) for m in (reversed(numbers) if kind is WeightBackward else numbers)]
    return (tuple(order),) * placement.size


def crossed(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """A deadlock: rank 0 does the first backward before the second forward, the others the reverse."""
    numbers = range(micro_batches)
    eager: Order = tuple(action for m in numbers for action in (Forward(m), Backward(m)))
    lazy: Order = (*(Forward(m) for m in numbers), *(Backward(m) for m in numbers))
    return (eager, *[lazy] * (placement.size - 1))


def without_weights(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """Declared to split backward, but without weight gradients."""
    return SCHEDULES["1f1b"].orders(micro_batches, placement)


def forgetful(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """No rank computes the last micro-batch's backward."""
    whole = SCHEDULES["gpipe"].orders(micro_batches, placement)
    return tuple(tuple(a for a in order if a != Backward(micro_batches - 1)) for order in whole)


def v_shaped(size: int, chunks: int) -> Placement:
    """Virtual stages go down the ranks and up again, once per chunk. With two chunks rank 0 has embedding and head."""
    rows = [[c * size + (size - 1 - rank if c % 2 else rank) for c in range(chunks)] for rank in range(size)]
    return Placement(tuple(map(tuple, rows)))


def v_schedule(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """Each rank has at most as many chunk forwards in flight as there are virtual stages."""
    return list_schedule(micro_batches, placement, lambda _: placement.virtual_stages)


def v_split(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """The same with backward in two halves."""
    return list_schedule(micro_batches, placement, lambda _: placement.virtual_stages, held=placement.virtual_stages)


THIRD_PARTY: dict[str, tuple[Orders, dict[str, Any]]] = {
    "v": (v_schedule, {"least_chunks": 2, "most_chunks": 4, "placement": v_shaped}),
    "v split": (v_split, {"least_chunks": 2, "most_chunks": 4, "placement": v_shaped, "splits_backward": True}),
    "hesitant": (hesitant, {"splits_backward": True, "most_chunks": 3}),
    "crossed": (crossed, {}),
    "without weights": (without_weights, {"splits_backward": True}),
    "undeclared": (hesitant, {}),
    "forgetful": (forgetful, {}),
}


def train_third_party(
    name: str, values: Values, task: RandomTask, plugins: tuple[str, ...] = ("pp",)
) -> dict[str, Any] | str:
    """Register a schedule and train with it, as a worker's job. Return the error sentence of a refused schedule."""
    function, options = THIRD_PARTY[name]
    schedule(name, **options)(function)
    try:
        return train_job(values, plugins, task)
    except ValueError as error:
        return str(error)
    finally:
        del SCHEDULES[name]


# Jobs.


def masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {group.name: group.master.detach().clone() for group in trainer.shares}


def owned_of(whole: Mapping[str, torch.Tensor], trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the part of the global tensors that each of a trainer's groups owns, by the group's name."""
    return {group.name: read_flat(whole[group.layout.name], group.layout) for group in trainer.shares}


def attempt(values: Values, plugins: Sequence[str]) -> str:
    """Return the sentence with which a run is refused, or `started`."""
    from femto_core.errors import UserError

    try:
        trainer = make_trainer(values, plugins)
    except UserError as error:
        return str(error)
    trainer.close()
    return "started"
