"""Ends: nothing is left after closing, and after a step that failed the next one is right or refused, never wrong."""

from __future__ import annotations

import gc
import os
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from femto_core.batch import Batch
from femto_core.hookspecs import hookimpl
from femto_core.loss import CrossEntropy, TokenStatistics
from femto_core.trainer import Trainer
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.core.test_replicated import Breaks, tensor_bytes
from tests.merging import Values, merged
from tests.zero.tasks import STAGES

pytestmark = pytest.mark.slow

EARLY = 10
BUILDS = {"stage 0": 40, "stage 1": 40, "stage 2": 40, "stage 3": 100}  # only stage 3 hangs hooks on modules


def hooks_left(trainer: Trainer) -> int:
    found = 0
    for module in trainer.stage.module.modules():
        found += len(module._forward_hooks) + len(module._forward_pre_hooks)
        found += len(module._backward_hooks) + len(module._backward_pre_hooks)
    for _, parameter in trainer.stage.named_parameters():
        after: Any = parameter._post_accumulate_grad_hooks
        before: Any = parameter._backward_hooks
        found += len(after or ()) + len(before or ())
    return found


def build_and_close(stage: str) -> dict[str, Any]:
    plugins, settings = STAGES[stage]
    small: Values = {"model": {"layers": 1}, "train": {"steps": 2}, "optim": {"warmup": 0}, "data": {"micro_batch": 4}}
    values = merged(settings, small)
    sizes, threads, files, hooks = [], [], [], 0
    last = BUILDS[stage]
    for number in range(1, last + 1):
        trainer = make_trainer(values, (*plugins, "bf16"))
        if number in (1, EARLY, last):
            trainer.train_step()
        trainer.close()
        hooks += hooks_left(trainer)
        del trainer
        if number in (EARLY, last):
            gc.collect()
            sizes.append(tensor_bytes())
            threads.append(len(os.listdir("/proc/self/task")))
            files.append(len(os.listdir("/proc/self/fd")))
    return {"hooks": hooks, "sizes": sizes, "threads": threads, "files": files}


@pytest.mark.parametrize("stage", STAGES)
def test_trainers_built_and_closed_leave_no_hook_no_memory_no_thread_and_no_file(pool: WorkerPool, stage: str) -> None:
    for seen in pool.run(2, build_and_close, stage, timeout_s=600):
        assert seen["hooks"] == 0
        for what in ("sizes", "threads", "files"):
            early, late = seen[what]
            assert late <= early, f"{what}: {early} after {EARLY} builds, {late} after {BUILDS[stage]}"


def closed_twice(stage: str) -> bool:
    plugins, settings = STAGES[stage]
    trainer = make_trainer(settings, plugins)
    trainer.train_step()
    trainer.close()
    trainer.close()
    return not hooks_left(trainer)


@pytest.mark.parametrize("stage", STAGES)
def test_closing_twice_is_closing_once(pool: WorkerPool, stage: str) -> None:
    assert pool.run(2, closed_twice, stage) == [True] * 2


# Failed steps.


@attrs.frozen
class FailingTask(RandomTask):
    """The loss of one micro-batch fails, in forward or in backward: everywhere at the same place."""

    at: int = 1
    where: str = "forward"

    @hookimpl
    def femto_loss(self) -> CrossEntropy:
        calls, task = 0, self

        class Failing(CrossEntropy):
            def __call__(
                self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
            ) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if calls == task.at and task.where == "forward":
                    raise MemoryError("out of memory")
                if calls == task.at and task.where == "backward":
                    hidden = Breaks.apply(hidden)  # type: ignore[no-untyped-call]
                return super().__call__(statistics, hidden, head, batch)

        return Failing()

    @hookimpl
    def femto_wrap_layer(self, name: str, layer: Any) -> None:
        if self.where == "middle of backward" and name.endswith("0"):
            calls = 0
            forward = layer.forward

            def breaking(hidden: torch.Tensor, **others: Any) -> Any:
                nonlocal calls
                calls += 1
                hidden = forward(hidden, **others)
                return Breaks.apply(hidden) if calls == self.at else hidden  # type: ignore[no-untyped-call]

            layer.forward = breaking


def try_again(stage: str, task: FailingTask) -> tuple[str, float, float]:
    plugins, settings = STAGES[stage]
    trainer = make_trainer(merged(settings, {"data": {"micro_batch": 1}}), plugins, {"random_task": task})
    with pytest.raises(MemoryError):
        trainer.train_step()
    trainer.loader.load_state_dict({"step": 0})
    try:
        info = trainer.train_step()
    except RuntimeError as error:
        return str(error), 0.0, 0.0
    finally:
        trainer.close()
    return "went on", info.loss, info.grad_norm


def straight() -> tuple[float, float]:
    trainer = make_trainer({})
    info = trainer.train_step()
    trainer.close()
    return info.loss, info.grad_norm


@pytest.fixture(scope="module")
def right(pool: WorkerPool) -> tuple[float, float]:
    """Loss and norm of the first step."""
    [(loss, norm)] = pool.run(1, straight)
    return loss, norm


def check(answer: tuple[str, float, float], right: tuple[float, float]) -> None:
    said, loss, norm = answer
    if said == "went on":
        assert (loss, norm) == pytest.approx(right, rel=1e-9), "gradients of the failed step were added"
    else:
        assert "earlier" in said


@pytest.mark.parametrize("where", ["forward", "backward", "middle of backward"])
@pytest.mark.parametrize("at", [1, 3, 4], ids=["first", "third", "last"])
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_step_that_failed_the_next_is_right_or_refused(
    pool: WorkerPool, right: tuple[float, float], stage: str, at: int, where: str
) -> None:
    """A run of four micro-batches: what the earlier ones left behind must not be added to the next step's."""
    for answer in pool.run(2, try_again, stage, FailingTask(at=at, where=where), timeout_s=60):
        check(answer, right)


@pytest.mark.parametrize("at", [1, 5])
def test_after_a_step_that_failed_on_one_process_too(pool: WorkerPool, right: tuple[float, float], at: int) -> None:
    [answer] = pool.run(1, try_again, "stage 0", FailingTask(at=at))
    check(answer, right)
