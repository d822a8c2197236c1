"""What the tests of pipelines share: settings, data and models that are hard to pipeline, a third party's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from femto_core.batch import Batch
from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel
from femto_core.testing import RandomRows, RandomTask, make_trainer, train_job
from femto_core.trainer import Trainer
from femto_pp.actions import Backward, Compute, Forward, WeightBackward
from femto_pp.pipeline import Pipeline
from femto_pp.placement import Placement
from femto_pp.schedules import SCHEDULES, Order, schedule
from tests.conftest import read_flat

Values = dict[str, dict[str, Any]]
NAMES = ("gpipe", "1f1b", "interleaved", "zb")
BOUND = 1e-9
SMALL_BUCKETS: Values = {"zero": {"bucket_mib": 0.002}}
ZERO: dict[str, Values] = {"": {}, "zero1": SMALL_BUCKETS, "zero2": SMALL_BUCKETS, "zero3": {}}
BASE: Values = {"train": {"steps": 3}, "model": {"layers": 4}}


def merged(*settings: Mapping[str, Mapping[str, Any]]) -> Values:
    """Return all `settings` together, the later ones on top."""
    result: Values = {}
    for values in settings:
        for section, entries in values.items():
            result[section] = {**result.get(section, {}), **entries}
    return result


def pipeline(name: str, size: int = 2, **section: Any) -> Values:
    """Return the settings of a pipeline."""
    return {"pp": {"size": size, "schedule": name, **section}}


def pipeline_of(trainer: Trainer) -> Pipeline:
    """Return the executor, for a look inside."""
    assert isinstance(trainer.schedule, Pipeline)
    return trainer.schedule


# Data and models.


@attrs.frozen
class UnequalRows(RandomRows):
    """Rows of 3 to 13 tokens."""

    def __getitem__(self, index: int) -> Batch:
        longest = attrs.evolve(super().__getitem__(index))
        length = 3 + (5 * index) % 11
        return Batch(**{field.name: getattr(longest, field.name)[:, :length] for field in attrs.fields(Batch)})


class UnequalTask(RandomTask):
    """Micro-batches (of one row each) that differ in length."""

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
    """A linear layer that knows nothing of halves of a backward: it is no plain `nn.Linear` any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class UnsplittableTask(RandomTask):
    """Some linear layers of a kind that nobody can split."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for number, layer in enumerate(model.module.model.layers):
            (layer.mlp.down_proj if number % 2 else layer.self_attn.q_proj).__class__ = PlainLinear


# Schedules of a third party.


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
    """Waits for ever: rank 0 wants the first backward before it does the second forward, the others the reverse."""
    numbers = range(micro_batches)
    eager: Order = tuple(action for m in numbers for action in (Forward(m), Backward(m)))
    lazy: Order = (*(Forward(m) for m in numbers), *(Backward(m) for m in numbers))
    return (eager, *[lazy] * (placement.size - 1))


def without_weights(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """Says that it splits backward, and forgets the other half."""
    return SCHEDULES["1f1b"].orders(micro_batches, placement)


def forgetful(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """Leaves out the last micro-batch's backward on the last rank, and everything that depends on it."""
    whole = SCHEDULES["gpipe"].orders(micro_batches, placement)
    return tuple(tuple(a for a in order if a != Backward(micro_batches - 1)) for order in whole)


THIRD_PARTY: dict[str, tuple[Callable[[int, Placement], tuple[Order, ...]], dict[str, Any]]] = {
    "hesitant": (hesitant, {"splits_backward": True, "most_chunks": 3}),
    "crossed": (crossed, {}),
    "without weights": (without_weights, {"splits_backward": True}),
    "undeclared": (hesitant, {}),
    "forgetful": (forgetful, {}),
}


def train_third_party(
    name: str, values: Values, task: RandomTask, plugins: tuple[str, ...] = ("pp",)
) -> dict[str, Any] | str:
    """Register a schedule, and train under it as a worker's job; return what is said where it is refused."""
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
    return {group.name: group.master.detach().clone() for group in trainer.groups}


def owned_of(whole: Mapping[str, torch.Tensor], trainer: Trainer) -> dict[str, torch.Tensor]:
    """Cut what each group of a trainer owns out of global tensors."""
    return {group.name: read_flat(whole[group.layout.name], group.layout) for group in trainer.groups}


def attempt(values: Values, plugins: Sequence[str]) -> str:
    """Say why a run will not start, or `started`."""
    from femto_core.errors import UserError

    try:
        trainer = make_trainer(values, plugins)
    except UserError as error:
        return str(error)
    trainer.close()
    return "started"
