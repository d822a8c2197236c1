"""Models that are hard to shard: parts frozen, unused here or now, recomputed, compiled; steps that are skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from femto_core.batch import Batch
from femto_core.hookspecs import hookimpl
from femto_core.loss import CrossEntropy, TokenStatistics
from femto_core.mesh import Mesh
from femto_report.samples import continue_tokens
from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, make_trainer, worst_difference
from tests.merging import Values, merged
from tests.zero.tasks import SHARDED, STAGES, HardTask, train_stage

BOUND = 1e-9
OneProcess = Callable[[Values, RandomTask], Record]
VALUES: Values = {"train": {"steps": 3}, "model": {"tied": False}, "data": {"micro_batch": 1}}

# Frozen parameters.

FROZEN = {
    "whole layers": HardTask(frozen=("layers.0.",)),
    "the last layer": HardTask(frozen=("layers.1.",)),
    "the embedding": HardTask(frozen=("embed_tokens",)),
    "embedding and first layer": HardTask(frozen=("embed_tokens", "layers.0.")),
    "single weights": HardTask(frozen=("layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "model.norm")),
    "all but one": HardTask(trainable=("layers.1.mlp.up_proj",)),
    "all but one of one element": HardTask(adapters=(0,), trainable=("layers.0.mlp.down_proj.one",)),
    "head and norm": HardTask(frozen=("lm_head", "model.norm")),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "frozen"),
    [
        *(("stage 1", frozen) for frozen in ("single weights", "all but one of one element")),
        *((stage, frozen) for stage in ("stage 2", "stage 3") for frozen in FROZEN),
    ],
)
def test_with_frozen_parameters_a_stage_trains_as_one_process(
    pool: WorkerPool, one_process: OneProcess, stage: str, frozen: str
) -> None:
    task = FROZEN[frozen]
    one = one_process(VALUES, task)
    two = assemble(pool.run(2, train_stage, stage, VALUES, task))
    assert worst_difference(one, two) < BOUND
    trained = set(one.gradients[0])
    assert trained
    assert trained < set(one.weights)
    assert all(set(step) == trained for step in two.gradients)


# Parameters that are not always used.


@pytest.mark.one_in(2)
@pytest.mark.parametrize("use", ["never", "always", "some rows"])
@pytest.mark.parametrize("stage", SHARDED)
def test_branches_that_rows_decide_on_train_as_in_one_process(
    pool: WorkerPool, one_process: OneProcess, stage: str, use: str
) -> None:
    """With zero-size, one-element and scalar parameters among them."""
    task = HardTask(adapters=(0, 1), use=use)
    one = one_process(VALUES, task)
    used = one.gradients[0]["model.layers.0.mlp.down_proj.one"].abs().max() > 0
    assert used == (use != "never")
    ranks = 4 if use == "some rows" else 2
    assert worst_difference(one, assemble(pool.run(ranks, train_stage, stage, VALUES, task))) < BOUND


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("use", ["on rank 1", "on all ranks but 1", "odd calls"])
def test_branches_that_ranks_or_steps_decide_on_train_as_without_sharding(
    pool: WorkerPool, use: str, micro_batch: int
) -> None:
    task = HardTask(adapters=(0, 1), use=use)
    values = merged(VALUES, {"data": {"micro_batch": micro_batch}})
    plain = assemble(pool.run(2, train_stage, "stage 0", values, task))
    for stage in SHARDED:
        found = assemble(pool.run(2, train_stage, stage, values, task, timeout_s=60))
        assert worst_difference(plain, found) < BOUND, stage


@pytest.mark.parametrize(("use", "prefetch"), [("on rank 1", 0), ("on rank 1", 1), ("some rows", 1)])
def test_a_branch_of_the_last_of_many_layers_used_on_one_rank_hangs_nobody(
    pool: WorkerPool, use: str, prefetch: int
) -> None:
    """The rank that used it waits for its sum, the other for weights: of one another, unless somebody is careful."""
    values = merged(VALUES, {"train": {"steps": 2}, "model": {"layers": 8}})
    task = HardTask(adapters=(7,), use=use)
    more: Values = {"zero": {"prefetch": prefetch}}
    plain = assemble(pool.run(2, train_stage, "stage 0", values, task))
    three = assemble(pool.run(2, train_stage, "stage 3", values, task, (), more, timeout_s=60))
    assert worst_difference(plain, three) < BOUND


@pytest.mark.parametrize(
    ("stage", "recompute"),
    [("stage 1", ""), ("stage 2", ""), ("stage 3", ""), ("stage 3", "layer"), ("stage 3", "region")],
)
def test_adapters_on_a_frozen_model_used_on_one_rank_only_train_as_without_sharding(
    pool: WorkerPool, stage: str, recompute: str
) -> None:
    """Backward goes deeper on the rank that used the first layer's: the others must gather for it all the same."""
    task = HardTask(adapters=(0, 2), trainable=("narrow", "wide", "model.norm"), use="on rank 1", recompute=recompute)
    values = merged(VALUES, {"train": {"steps": 2}, "model": {"layers": 4}})
    plain = assemble(pool.run(2, train_stage, "stage 0", values, task))
    assert worst_difference(plain, assemble(pool.run(2, train_stage, stage, values, task, timeout_s=60))) < BOUND


class Transposed(torch.autograd.Function):
    """Hands the gradient on in another order of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        [grad] = grads
        return grad.t().contiguous().t()


@attrs.frozen
class TransposedTask(RandomTask):
    """Every matrix of the MLPs has a gradient that is not contiguous."""

    @hookimpl
    def femto_wrap_layer(self, layer: Any) -> None:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.__class__ = TransposedLinear


class TransposedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = Transposed.apply(self.weight)  # type: ignore[no-untyped-call]
        assert weight.shape == self.weight.shape
        return nn.functional.linear(x, weight)


@pytest.mark.parametrize("stage", SHARDED)
def test_gradients_that_are_not_contiguous_train_alike(pool: WorkerPool, one_process: OneProcess, stage: str) -> None:
    two = assemble(pool.run(2, train_stage, stage, VALUES, TransposedTask()))
    assert worst_difference(one_process(VALUES, RandomTask()), two) < BOUND


# Recomputation.


START = ("embed_tokens", "layers.0.")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stage", "recompute", "frozen"),
    [
        *(("stage 1", "both", ()), ("stage 2", "both", START)),
        *(("stage 3", recompute, frozen) for recompute in ("layer", "region", "both") for frozen in ((), START)),
    ],
)
def test_recomputation_changes_no_bit(pool: WorkerPool, stage: str, recompute: str, frozen: tuple[str, ...]) -> None:
    values = merged(VALUES, {"train": {"steps": 2}, "model": {"layers": 3}})
    plain, again = (
        assemble(pool.run(2, train_stage, stage, values, HardTask(frozen=frozen, recompute=r))) for r in ("", recompute)
    )
    assert worst_difference(plain, again) == 0


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("recompute", ["reentrant layer", "reentrant region"])
def test_reentrant_recomputation_trains_alike_in_stage_3(
    pool: WorkerPool, one_process: OneProcess, recompute: str
) -> None:
    values = merged(VALUES, {"model": {"layers": 3}})
    three = assemble(pool.run(2, train_stage, "stage 3", values, HardTask(recompute=recompute)))
    assert worst_difference(one_process(values, RandomTask()), three) < BOUND


# What happens between steps.


def with_interruptions(stage: str, interrupted: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    plugins, settings = STAGES[stage]
    trainer = make_trainer(merged(settings, {"model": {"layers": 3}}), plugins, {"random_task": RandomTask()})
    losses = []
    for number in range(5):
        losses.append(trainer.train_step().loss)
        if interrupted and number in (0, 2, 3):
            assert math.isfinite(trainer.evaluate())
            assert len(continue_tokens(trainer, [1, 2, 3], count=3, temperature=0.7, seed=number, end_id=None)) == 3
            trainer.save()
    trainer.checkpointer.wait()
    weights = {group.name: group.master.detach().clone() for group in trainer.shares}
    trainer.close()
    return losses, weights


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_sampling_and_saving_change_no_bit_of_what_follows(pool: WorkerPool, stage: str) -> None:
    straight, interrupted = (pool.run(2, with_interruptions, stage, yes) for yes in (False, True))
    for (losses, weights), (others, found) in zip(straight, interrupted, strict=True):
        assert losses == others
        assert all(torch.equal(weight, found[name]) for name, weight in weights.items())


def evaluations(stage: str) -> tuple[list[float], list[int]]:
    plugins, settings = STAGES[stage]
    trainer = make_trainer(settings, plugins)
    losses, tokens = [], []
    for _ in range(3):
        trainer.train_step()
        losses.append(trainer.evaluate())
        tokens += continue_tokens(trainer, [1, 2, 3], count=2, temperature=0.0, seed=0, end_id=None)
    trainer.close()
    return losses, tokens


@pytest.mark.parametrize("stage", SHARDED)
def test_evaluation_and_sampling_see_the_weights_of_the_last_step(pool: WorkerPool, stage: str) -> None:
    [(losses, tokens)] = pool.run(1, evaluations, "stage 0")
    for found, others in pool.run(4, evaluations, stage):
        assert found == pytest.approx(losses, rel=1e-12)
        assert others == tokens


# Skipped steps.


@attrs.frozen
class PoisonedTask(RandomTask):
    """In step 2 one rank's loss is not finite."""

    value: float = math.nan

    @hookimpl
    def femto_loss(self, mesh: Mesh) -> CrossEntropy:
        calls, task = 0, self

        class Poisoned(CrossEntropy):
            def __call__(
                self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
            ) -> torch.Tensor:
                nonlocal calls
                calls += 1
                right = super().__call__(statistics, hidden, head, batch)
                return right * task.value if calls == 8 // mesh.size("dp") + 1 and mesh.rank == 1 else right

        return Poisoned()


def skipping(stage: str, value: float, extra: tuple[str, ...]) -> tuple[list[bool], list[dict[str, torch.Tensor]]]:
    plugins, settings = STAGES[stage]
    values = merged(settings, {"data": {"micro_batch": 1}})
    trainer = make_trainer(values, (*plugins, *extra), {"random_task": PoisonedTask(value=value)})
    flags, weights = [], []
    for _ in range(3):
        flags.append(trainer.train_step().skipped)
        weights.append({g.name: g.master.detach().clone() for g in trainer.shares})
        weights[-1] |= {f"{g.name} computed": g.compute.detach().clone() for g in trainer.shares}
        state = [t for entry in trainer.optimizer.state.values() for t in entry.values()]
        assert all(bool(torch.as_tensor(t).isfinite().all()) for t in state)
        assert not any(g.master.grad is not None or g.compute.grad is not None for g in trainer.shares)
        assert not any(p.grad is not None for _, p in trainer.stage.named_parameters())
    trainer.close()
    return flags, weights


@pytest.mark.parametrize(("value", "extra"), [(math.nan, ()), (math.inf, ("bf16",))], ids=["nan", "inf in bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    pool: WorkerPool, stage: str, value: float, extra: tuple[str, ...]
) -> None:
    for flags, weights in pool.run(2, skipping, stage, value, extra, timeout_s=60):
        assert flags == [False, True, False]
        first, second, third = weights
        assert all(torch.equal(weight, second[name]) for name, weight in first.items())
        assert any(not torch.equal(weight, third[name]) for name, weight in second.items())
        assert all(bool(weight.isfinite().all()) for weight in third.values())


# torch.compile.


@pytest.mark.slow
@pytest.mark.parametrize("stage", SHARDED)
def test_compiled_layers_train_alike(pool: WorkerPool, one_process: OneProcess, stage: str) -> None:
    values = merged(VALUES, {"train": {"steps": 3}, "model": {"layers": 2}})
    compiled = merged(values, {"train": {"compile": True}})
    two = assemble(pool.run(2, train_stage, stage, compiled, RandomTask(), timeout_s=600))
    assert worst_difference(one_process(values, RandomTask()), two) < BOUND
