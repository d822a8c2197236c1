"""Backward with deferred weight gradients, with recomputed layers, and with attention dropout."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from femto_core.hookspecs import hookimpl
from femto_tools.testing import RandomTask, WorkerPool, assemble, make_trainer, train_job, worst_difference
from tests.conftest import DropoutTask
from tests.tp.tools import Values, merged, tp, train_tp

pytestmark = pytest.mark.slow

MODEL: Values = {"model": {"family": "qwen2", "heads": 4, "kv_heads": 2, "vocab_size": 37}, "data": {"micro_batch": 2}}
CUTS = [(2, False), (2, True), (4, False), (4, True)]
IDS = ["tp 2", "tp 2, parts of rows", "tp 4, replicas", "tp 4, replicas, parts of rows"]


# Deferred weight gradients.


def immediate_and_deferred(values: Values) -> tuple[float, dict[str, set[int]], list[str]]:
    """Return the largest difference, the hook calls per parameter, and the gradients missing after backward."""
    trainer = make_trainer(values, ("tp",), {"random_task": RandomTask(documents=2)})
    trainer.sharding.close()  # gradients stay in .grad
    micro_batches = trainer.loader.next_step()[:2]
    named = dict(trainer.stage.named_parameters())
    counts: Counter[str] = Counter()

    def saw(name: str, parameter: torch.Tensor) -> None:
        counts[name] += parameter.grad is not None  # torch calls the hook even if a backward returned None

    for name, parameter in named.items():
        parameter.register_post_accumulate_grad_hook(functools.partial(saw, name))  # type: ignore[no-untyped-call]

    def loss_of(batch: Any) -> torch.Tensor:
        hidden = trainer.stage.forward(batch.input_ids, batch)
        return trainer.loss(hidden, trainer.stage.head, batch)

    def take() -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        for p in named.values():
            p.grad = None
        return found

    for batch in micro_batches:
        loss_of(batch).backward()  # type: ignore[no-untyped-call]
    wanted = take()
    counts.clear()
    passes, missing = [], []
    for batch in micro_batches:
        loss = loss_of(batch)
        with trainer.stage.weight_grads.defer() as deferred:
            loss.backward()  # type: ignore[no-untyped-call]
        passes.append(deferred)
        if len(passes) == 1:
            missing = sorted(name for name, p in named.items() if p.grad is None)
            counts.clear()
    for deferred in passes:
        deferred.compute()
        deferred.compute()  # a second call computes nothing
    found = take()
    trainer.close()
    assert found.keys() == wanted.keys() == named.keys()
    worst = max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in named)
    return worst, {name: {number} for name, number in counts.items()}, missing


@pytest.mark.parametrize(("size", "sequence_parallel"), CUTS, ids=IDS)
def test_deferred_gradients_equal_immediate_ones(pool: WorkerPool, size: int, sequence_parallel: bool) -> None:
    matrices = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    for worst, _, missing in pool.run(size, immediate_and_deferred, merged(MODEL, tp(size, sequence_parallel))):
        assert worst < 1e-12
        deferred = {name.split(".")[-2] for name in missing}
        assert deferred == matrices, "otherwise nothing was deferred"
        assert "model.layers.0.self_attn.q_proj.bias" in missing
        assert not any("norm" in name or "embed" in name for name in missing)


def hooks_of_one_put_off(values: Values) -> dict[str, int]:
    trainer = make_trainer(values, ("tp",))
    trainer.sharding.close()
    counts: Counter[str] = Counter()
    for name, parameter in trainer.stage.named_parameters():

        def saw(p: torch.Tensor, name: str = name) -> None:
            counts[name] += p.grad is not None
            p.grad = None

        parameter.register_post_accumulate_grad_hook(saw)  # type: ignore[no-untyped-call]
    batch = trainer.loader.next_step()[0]
    hidden = trainer.stage.forward(batch.input_ids, batch)
    with trainer.stage.weight_grads.defer() as deferred:
        trainer.loss(hidden, trainer.stage.head, batch).backward()  # type: ignore[no-untyped-call]
    deferred.compute()
    trainer.close()
    return dict(counts)


@pytest.mark.parametrize(("size", "sequence_parallel"), CUTS, ids=IDS)
def test_each_parameters_hook_sees_its_gradient_once(pool: WorkerPool, size: int, sequence_parallel: bool) -> None:
    for counts in pool.run(size, hooks_of_one_put_off, merged(MODEL, tp(size, sequence_parallel))):
        assert set(counts.values()) == {1}
        assert len(counts) == 2 + 2 * 12


# Recomputed layers.


@attrs.frozen
class RecomputingTask(DropoutTask):
    """Recomputes every layer in backward."""

    reentrant: bool = False
    drops: bool = False

    @hookimpl
    def femto_wrap_layer(self, layer: Any) -> None:
        layer.forward = functools.partial(recomputed, layer.forward, self.reentrant)

    @hookimpl
    def femto_transform_model(self, model: Any) -> None:
        if self.drops:
            for module in model.module.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.3


@attrs.frozen
class PlainDropoutTask(RandomTask):
    """Uses the same dropout without recomputation."""

    @hookimpl
    def femto_transform_model(self, model: Any) -> None:
        RecomputingTask(drops=True).femto_transform_model(model)


def recomputed(forward: Callable[..., torch.Tensor], reentrant: bool, hidden: torch.Tensor, **others: Any) -> Any:
    return checkpoint(functools.partial(forward, **others), hidden, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize(("size", "sequence_parallel"), CUTS, ids=IDS)
def test_recomputed_layers_give_the_same_bits(
    pool: WorkerPool, size: int, sequence_parallel: bool, reentrant: bool
) -> None:
    values = merged(MODEL, {"train": {"steps": 3}}, tp(size, sequence_parallel))
    plain = pool.run(size, train_tp, values, (), RandomTask(documents=2))
    again = pool.run(size, train_tp, values, (), RecomputingTask(documents=2, reentrant=reentrant))
    assert same_bits(plain, again)


def same_bits(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Return whether each rank got the same results."""
    return all(
        a["losses"] == b["losses"]
        and all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
        and all(
            torch.equal(g[name], h[name]) for g, h in zip(a["gradients"], b["gradients"], strict=True) for name in g
        )
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "parts of rows"])
def test_recomputed_layers_defer_their_gradients_too(pool: WorkerPool, sequence_parallel: bool) -> None:
    values = merged(MODEL, tp(2, sequence_parallel))
    assert all(worst < 1e-12 for worst in pool.run(2, recomputed_and_deferred, values))


def recomputed_and_deferred(values: Values) -> float:
    trainer = make_trainer(values, ("tp",), {"random_task": RecomputingTask()})
    trainer.sharding.close()
    batch = trainer.loader.next_step()[0]
    found = []
    for deferred in (False, True):
        loss = trainer.loss(trainer.stage.forward(batch.input_ids, batch), trainer.stage.head, batch)
        if deferred:
            with trainer.stage.weight_grads.defer() as halves:
                loss.backward()  # type: ignore[no-untyped-call]
            halves.compute()
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        found.append({name: p.grad for name, p in trainer.stage.named_parameters() if p.grad is not None})
        assert len(found[-1]) == 2 + 2 * 12
        for _, p in trainer.stage.named_parameters():
            p.grad = None
    trainer.close()
    return max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])


# Dropout.


def with_dropout(values: Values, task: RandomTask) -> dict[str, Any]:
    return {**train_job(values, ("tp",), task), "random": torch.get_rng_state()}


@pytest.mark.parametrize(("size", "sequence_parallel"), CUTS, ids=IDS)
def test_dropout_is_reproducible_and_differs_between_ranks(
    pool: WorkerPool, size: int, sequence_parallel: bool
) -> None:
    """Seeds differ in their draws; replicated parameters keep equal bits; recomputation changes nothing."""
    values = merged(MODEL, {"train": {"steps": 3}}, tp(size, sequence_parallel))
    task = PlainDropoutTask()
    runs = [pool.run(size, with_dropout, values, task) for _ in range(2)]
    assert same_bits(*runs)
    states = [part["random"] for part in runs[0]]
    assert all(not torch.equal(a, b) for n, a in enumerate(states) for b in states[:n])
    assemble(runs[0])  # checks that replicated parameters are equal
    without = pool.run(size, with_dropout, values, RandomTask())
    assert not same_bits(runs[0], without)
    assert same_bits(runs[0], pool.run(size, with_dropout, values, RecomputingTask(drops=True)))


def masks(values: Values) -> torch.Tensor:
    """Return which elements dropout zeroed in attention over one head's worth of ones."""
    trainer = make_trainer(values, ("tp",), {"random_task": PlainDropoutTask()})
    drawn = torch.rand(8)
    trainer.close()
    return drawn


def test_no_two_ranks_draw_the_same_numbers(pool: WorkerPool) -> None:
    """Ranks along tp have other heads, and ranks along dp see other rows."""
    drawn = pool.run(4, masks, merged(MODEL, tp(2)))
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 4
    again = pool.run(4, masks, merged(MODEL, tp(2)))
    assert all(map(torch.equal, drawn, again))
    other = pool.run(4, masks, merged(MODEL, tp(2), {"train": {"seed": 1}}))
    assert len({tuple(numbers.tolist()) for numbers in [*drawn, *other]}) == 8


def test_recomputation_agrees_with_one_process(pool: WorkerPool) -> None:
    values = merged(MODEL, {"train": {"steps": 5}})
    one = assemble(pool.run(1, train_tp, merged(values, {"data": {"micro_batch": 8}}), (), RandomTask()))
    for size, sequence_parallel, stage in ((2, True, "zero3"), (4, True, "")):
        cut = merged(values, tp(size, sequence_parallel))
        parts = pool.run(4, train_tp, cut, (stage,) if stage else (), RecomputingTask())
        assert worst_difference(one, assemble(parts)) < 1e-9
