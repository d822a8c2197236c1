"""A stage on its own: built without a trainer, frozen or trained, beside another one, under every kind of plugin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from femto_core import hookspecs
from femto_core.batch import Batch
from femto_core.build import LoadedStage, build_stage
from femto_core.hooks import Hooks
from femto_core.model import FullModel
from femto_core.trainer import Trainer
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.merging import Values, merged

BASE: Values = {"model": {"layers": 4}, "train": {"steps": 3}}
LAYOUTS: list[tuple[int, tuple[str, ...], Values]] = [
    (1, (), {}),
    (2, (), {}),
    (2, ("zero1",), {}),
    (2, ("zero2", "bf16"), {"zero": {"bucket_mib": 0.006}}),
    (2, ("zero3", "bf16", "sac"), {}),
    (2, ("tp", "sac"), {"tp": {"size": 2}}),
    (2, ("pp",), {"pp": {"size": 2}}),
    (4, ("pp", "zero3"), {"pp": {"size": 2}}),
]


def model_of(trainer: Trainer) -> FullModel:
    return trainer.hooks.seat(hookspecs.femto_model, config=trainer.config)


def second_stage(trainer: Trainer, *, trainable: bool = False) -> LoadedStage:
    return build_stage(trainer.config, trainer.hooks, trainer.mesh, model=model_of(trainer), trainable=trainable)


def losses_of(trainer: Trainer, built: LoadedStage, batches: list[Batch]) -> list[float]:
    """The loss of each batch under a stage, on every rank."""

    def loss(batch: Batch) -> float:
        on_device = batch.to(trainer.mesh.device)
        found: torch.Tensor = built.schedule.forward(
            built.stage, batch, lambda hidden, head: trainer.loss(hidden, head, on_device)
        )
        return float(found)

    return [loss(batch) for batch in batches]


def watched(stage: Any) -> int:
    """How many hooks wait for gradients of the stage."""
    return sum(
        len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for _, p in stage.named_parameters()
    )


def frozen_stage(values: Values, plugins: tuple[str, ...]) -> dict[str, Any]:
    trainer = make_trainer(merged(BASE, values), plugins)
    batches = [batch for _ in range(2) for batch in trainer.loader.next_step()]
    own = LoadedStage(
        stage=trainer.stage,
        schedule=trainer.schedule,
        precision=trainer.precision,
        sharding=trainer.sharding,
        shares=trainer.shares,
    )
    with trainer.stage.evaluating():
        expected = losses_of(trainer, own, batches)
    model = model_of(trainer)
    built = build_stage(trainer.config, trainer.hooks, trainer.mesh, model=model, trainable=False)
    sharding: Any = built.sharding
    gradients = sharding._gradients
    seen = {
        "losses": losses_of(trainer, built, batches) == expected,
        "trainable": built.stage.trainable or any(share.trainable for share in built.shares),
        "training": built.stage.module.training,
        "masters": sum(share.master is not share.compute for share in built.shares),
        "gradients": sum(p.grad is not None for _, p in built.stage.named_parameters()),
        "buckets": len(gradients._collector.buckets) if hasattr(gradients, "_collector") else 0,
        "watched": watched(built.stage),
        "wrapped": sum(
            type(layer).__name__ == "ActivationCheckpointWrapper" for _, layer in built.stage.named_layers()
        ),
        "given": all(p.requires_grad and p.is_meta for p in model.module.parameters()),
        "shared": sum(
            mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata
            for (_, mine), (_, theirs) in zip(
                built.stage.named_parameters(), trainer.stage.named_parameters(), strict=True
            )
        ),
    }
    built.close()
    trainer.close()
    return seen


@pytest.mark.parametrize(("ranks", "plugins", "values"), LAYOUTS)
def test_a_frozen_stage_computes_the_same_and_has_no_masters_no_gradients_and_nothing_that_waits_for_them(
    pool: WorkerPool, ranks: int, plugins: tuple[str, ...], values: Values
) -> None:
    for seen in pool.run(ranks, frozen_stage, values, plugins):
        assert seen == {
            "losses": True,
            "trainable": False,
            "training": False,
            "masters": 0,
            "gradients": 0,
            "buckets": 0,
            "watched": 0,
            "wrapped": 0,
            "given": True,
            "shared": 0,
        }


def trained_beside_another(values: Values, plugins: tuple[str, ...], second: str) -> tuple[list[float], list[float]]:
    """Train with a second stage that is run in each step; return the losses of both."""
    trainer = make_trainer(merged(BASE, values), plugins, {"task": RandomTask()})
    built = second_stage(trainer) if second else None
    batches = [trainer.collator([trainer.held_out[0]])]
    losses, others = [], []
    for _ in range(3):
        losses.append(trainer.train_step().loss)
        if built is not None:
            others += losses_of(trainer, built, batches)
    if built is not None:
        built.close()
        losses.append(trainer.evaluate())
    trainer.close()
    return losses, others


@pytest.mark.parametrize(("ranks", "plugins", "values"), LAYOUTS)
def test_a_second_stage_stands_still_and_leaves_training_as_it_is(
    pool: WorkerPool, ranks: int, plugins: tuple[str, ...], values: Values
) -> None:
    plain = pool.run(ranks, trained_beside_another, values, plugins, "")
    beside = pool.run(ranks, trained_beside_another, values, plugins, "frozen")
    for (losses, _), (mine, others) in zip(plain, beside, strict=True):
        assert mine[:3] == losses
        assert len(set(others)) == 1, "nobody trains it"
        assert mine[3] == mine[3], "the first stage goes on after the second was closed"


def trained_alone(plugins: tuple[str, ...]) -> tuple[float, int, int]:
    """Build a second, trainable stage; take its gradients by hand; return their difference from the trainer's."""
    trainer = make_trainer(merged(BASE, {"model": {"tied": False}}), plugins)
    built = second_stage(trainer, trainable=True)
    batches = trainer.loader.next_step()
    scale = torch.ones((), dtype=torch.float64)
    worst = 0.0
    trainer.schedule.run(trainer.stage, batches, trainer.loss, scale, trainer.sharding)
    trainer.sharding.finish_gradients()
    built.schedule.run(built.stage, batches, trainer.loss, scale, built.sharding)
    built.sharding.finish_gradients()
    for mine, theirs in zip(built.shares, trainer.shares, strict=True):
        assert mine.trainable
        assert mine.compute.grad is not None
        assert theirs.compute.grad is not None
        if mine.compute.numel():
            worst = max(worst, float((mine.compute.grad - theirs.compute.grad).abs().max()))
    waiting = watched(built.stage)
    built.close()
    left = watched(built.stage)
    trainer.close()
    return worst, waiting, left


@pytest.mark.parametrize("plugins", [(), ("zero2",), ("zero3", "bf16")], ids=lambda names: "+".join(names) or "none")
def test_a_trainable_stage_built_alone_has_the_trainers_gradients_until_it_is_closed(
    pool: WorkerPool, plugins: tuple[str, ...]
) -> None:
    for worst, waiting, left in pool.run(2, trained_alone, plugins):
        assert worst == 0
        assert waiting > 0
        assert left == 0


class Halved:
    """Halves the model's head, as a plugin that changes weights would."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def read(self, name: str, boxes: Any) -> list[torch.Tensor]:
        return [values / 2 for values in self.inner.read(name, boxes)]


def from_other_weights() -> tuple[float, float]:
    trainer = make_trainer(merged(BASE, {"model": {"tied": False}}))
    model = model_of(trainer)
    model.weights = Halved(model.weights)
    built = build_stage(trainer.config, Hooks(trainer.hooks.manager), trainer.mesh, model=model, trainable=False)
    pairs = zip(built.shares, trainer.shares, strict=True)
    apart = max(float((2 * mine.master - theirs.master).abs().max()) for mine, theirs in pairs)
    head: nn.Module = built.stage.head
    norm = float(next(head.parameters()).norm())
    built.close()
    trainer.close()
    return apart, norm


def test_a_stage_takes_its_weights_from_the_models_own_source(pool: WorkerPool) -> None:
    [(apart, norm)] = pool.run(1, from_other_weights)
    assert apart == 0
    assert norm > 0
