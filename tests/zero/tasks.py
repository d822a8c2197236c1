"""Models that are hard to shard: adapters used now and then, frozen parts, regions recomputed; settings of stages."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from femto_core.hookspecs import hookimpl
from femto_core.layout import Box
from femto_core.model import FullModel, Stage
from femto_core.trainer import Trainer
from femto_core.weights import WeightSource
from femto_tools.testing import RandomTask, train_job
from femto_zero.sharded import ShardedWeights
from femto_zero.units import Unit
from tests.merging import Values, merged

SMALL_BUCKETS: Values = {"zero": {"bucket_mib": 0.006}}
STAGES: dict[str, tuple[tuple[str, ...], Values]] = {
    "stage 0": ((), {}),
    "stage 1": (("zero1",), SMALL_BUCKETS),
    "stage 2": (("zero2",), SMALL_BUCKETS),
    "stage 3": (("zero3",), {"zero": {"prefetch": 1}}),
}
SHARDED = tuple(STAGES)[1:]


def train_stage(
    stage: str, values: Values, task: RandomTask, extra: tuple[str, ...] = (), more: Values | None = None
) -> dict[str, Any]:
    """Train as a worker's job, under a stage and the plugins `extra`."""
    plugins, settings = STAGES[stage]
    return train_job(merged(settings, values, more or {}), (*plugins, *extra), task)


# Adapters.


class Adapted(nn.Linear):
    """A linear layer with a branch beside it, whose parameters have odd shapes, and which is not always used."""

    use: str
    calls: int
    narrow: nn.Parameter
    wide: nn.Parameter
    scalar: nn.Parameter
    one: nn.Parameter
    empty: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        self.calls += torch.is_grad_enabled()
        if not self._is_used(x):
            return y
        return y + F.linear(F.linear(x, self.narrow), self.wide) * self.scalar + self.one + self.empty.sum()

    def _is_used(self, x: torch.Tensor) -> bool:
        return {
            "always": True,
            "never": False,
            "on rank 1": dist.get_rank() == 1,
            "on all ranks but 1": dist.get_rank() != 1,
            "some rows": bool(x[0, 0, 0] > 0),
            "odd calls": self.calls % 2 == 1,
        }[self.use]


SHAPES: dict[str, Callable[[nn.Linear], tuple[int, ...]]] = {
    "narrow": lambda linear: (3, linear.in_features),
    "wide": lambda linear: (linear.out_features, 3),
    "scalar": lambda linear: (),
    "one": lambda linear: (1,),
    "empty": lambda linear: (0, 4),
}


@attrs.frozen
class WithAdapters:
    """The weights of a model, and numbers decided by their names for what it did not have."""

    base: WeightSource
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        if name not in self.shapes:
            return self.base.read(name, boxes)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        whole = torch.randn(self.shapes[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 5
        return [whole[box.slices()] for box in boxes]


def adapt(model: FullModel, layers: Sequence[int], use: str) -> None:
    """Give the MLPs of `layers` an adapter each."""
    shapes = {}
    for number in layers:
        linear = model.module.model.layers[number].mlp.down_proj
        linear.__class__ = Adapted
        linear.use, linear.calls = use, 0
        for key, shape_of in SHAPES.items():
            shape = shape_of(linear)
            setattr(linear, key, nn.Parameter(torch.empty(shape, device="meta")))
            shapes[f"model.layers.{number}.mlp.down_proj.{key}"] = shape
    model.weights = WithAdapters(model.weights, shapes)


@attrs.frozen
class HardTask(RandomTask):
    """Random rows, and a model with adapters, frozen parts, or regions that are recomputed."""

    adapters: tuple[int, ...] = ()
    use: str = "always"
    trainable: tuple[str, ...] = ("",)
    """Only parameters whose name contains one of these are trained."""
    frozen: tuple[str, ...] = ()
    """Of those, parameters whose name contains one of these are not."""
    recompute: str = ""
    """layer: each by itself; region: all together; both: one inside the other; with 'reentrant ' in front, that way."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        if self.adapters:
            adapt(model, self.adapters, self.use)
        for name, parameter in model.module.named_parameters():
            wanted = any(part in name for part in self.trainable) and not any(part in name for part in self.frozen)
            parameter.requires_grad_(wanted)

    @hookimpl
    def femto_wrap_layer(self, layer: Any) -> None:
        if self.recompute.endswith(("layer", "both")):
            layer.forward = functools.partial(recomputed, layer.forward, "reentrant" in self.recompute)

    @hookimpl
    def femto_parallelize(self, stage: Stage) -> None:
        if self.recompute.endswith(("region", "both")):
            # transformers' forward takes a slice of the layers: it gets one thing that runs them all.
            make, reentrant = stage._make_body, "reentrant" in self.recompute

            def make_with_region(chunk: int) -> nn.Module:
                body = make(chunk)
                layers: Any = body.layers
                layers.__class__ = Region
                layers.use_reentrant = reentrant
                return body

            stage._make_body = make_with_region  # type: ignore[method-assign]


def recomputed(forward: Callable[..., torch.Tensor], reentrant: bool, hidden: torch.Tensor, **others: Any) -> Any:
    """Return forward(hidden, **others), which backward runs again."""
    return checkpoint(functools.partial(forward, **others), hidden, use_reentrant=reentrant)


class Region(nn.ModuleList):
    """Layers that are recomputed together."""

    use_reentrant: bool

    def __getitem__(self, index: Any) -> Any:
        layers = list(self._modules.values())

        def run(hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
            for layer in layers:
                assert layer is not None
                hidden = layer(hidden, **arguments)
            return hidden

        return [functools.partial(recomputed, run, self.use_reentrant)]


# Looking at stage 3 from outside.


def units_of(trainer: Trainer) -> list[Unit]:
    """Return the units of stage 3, in the order of forward."""
    assert isinstance(trainer.sharding, ShardedWeights)
    return trainer.sharding._units


def live_bytes(unit: Unit) -> int:
    """Return the bytes that a unit's whole vectors take at this moment."""
    return sum(flat.whole.untyped_storage().nbytes() for flat in unit.flats)


def whole_bytes(unit: Unit) -> int:
    """Return the bytes that they take when they are there."""
    return sum(flat.nbytes for flat in unit.flats)
