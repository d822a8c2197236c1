"""The contract of a step's data: what losses are divided by, what layers add to them, what loaders owe all ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from femto_core.batch import Batch
from femto_core.data import Loader
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.loss import CrossEntropy, TokenStatistics
from femto_core.metrics import StepInfo
from femto_core.model import Stage
from femto_core.trainer import Trainer
from femto_report.samples import continue_tokens
from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, make_trainer, train_job, worst_difference
from tests.conftest import DropoutTask
from tests.merging import Values, merged

BOUND = 1e-9
PLAIN = RandomTask()


# What a loss is divided by.


class Weightless(RandomTask):
    """Its loss is a plain function."""

    @hookimpl
    def femto_loss(self) -> Any:
        return lambda statistics, hidden, head, batch: statistics.cross_entropy(hidden, head, batch.targets)


@attrs.frozen
class Weighted(RandomTask):
    """Cross-entropy whose weight in step `step` is something else on one rank."""

    factor: float = 1.0
    """On all ranks, in all steps."""
    value: float | None = None
    rank: int = 1
    step: int = 2

    @hookimpl
    def femto_loss(self) -> CrossEntropy:
        task, calls = self, 0

        class Other(CrossEntropy):
            def weight(self, batch: Batch) -> float:
                nonlocal calls
                calls += 1
                here = torch.distributed.get_rank() == task.rank
                if task.value is not None and here and calls == 4 * (task.step - 1) + 2:
                    return task.value
                return task.factor * batch.valid

        return Other()


def said_by(task: RandomTask) -> tuple[str, int, bool]:
    """Train until something is refused; return the sentence, the steps done, and whether weights are finite."""
    try:
        trainer = make_trainer({}, (), {"task": task})
    except UserError as error:
        return str(error), -1, True
    try:
        trainer.train()
    except UserError as error:
        finite = all(bool(share.master.isfinite().all()) for share in trainer.shares)
        return str(error), trainer.step, finite
    finally:
        trainer.close()
    return "", trainer.step, True


def test_a_loss_that_does_not_say_its_weight_is_refused_before_the_first_step(pool: WorkerPool) -> None:
    for said, step, _ in pool.run(2, said_by, Weightless()):
        assert step == -1
        assert said == (
            "the loss function has no method weight(batch), which says what its sums are divided by; for a mean over "
            "valid targets it returns batch.valid"
        )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, -1e-9, -1e9])
def test_a_weight_that_is_negative_or_not_finite_ends_the_run_on_all_ranks_before_the_update(
    pool: WorkerPool, value: float, rank: int
) -> None:
    """On the other rank, and in the other micro-batches, weights are right, so that a small one hides in the sum."""
    for said, step, finite in pool.run(2, said_by, Weighted(value=value, rank=rank), timeout_s=60):
        assert said == ("step 2: weight(batch) of the loss must be finite, 0 or more, for every micro-batch")
        assert step == 1
        assert finite


@pytest.mark.parametrize("factor", [1 / 1024, 0.5, 4.0])
def test_a_weight_below_one_or_above_scales_loss_and_gradients_whatever_the_split(
    pool: WorkerPool, factor: float
) -> None:
    values: Values = {"optim": {"clip": 0.0}}
    plain = assemble(pool.run(1, train_job, values, (), PLAIN))
    one, two = (assemble(pool.run(ranks, train_job, values, (), Weighted(factor=factor))) for ranks in (1, 2))
    assert worst_difference(one, two) < BOUND
    assert one.losses[0] == plain.losses[0] / factor
    assert one.norms[0] == pytest.approx(plain.norms[0] / factor, rel=1e-12)
    for name, gradient in plain.gradients[0].items():
        torch.testing.assert_close(one.gradients[0][name], gradient / factor, rtol=1e-12, atol=0)


def test_a_step_whose_weight_is_zero_is_left_out_though_it_has_targets(pool: WorkerPool) -> None:
    for said, step, _ in pool.run(2, said_by, Weighted(factor=0.0)):
        assert (said, step) == ("", 6)
    record = assemble(pool.run(2, train_job, {}, (), Weighted(factor=0.0)))
    start = assemble(pool.run(1, train_job, {"train": {"stop_after": 0}}, (), RandomTask(masked=1.0)))
    assert all(math.isnan(loss) for loss in record.losses)
    assert all(torch.equal(weight, start.weights[name]) for name, weight in record.weights.items())


# What loaders owe all ranks.


@attrs.frozen
class Uneven(RandomTask):
    """From step 3 on the loader makes another number of micro-batches on rank 1, all of them good ones."""

    change: int = 1
    fault: bool = True

    @hookimpl(wrapper=True)
    def femto_loader(self) -> Generator[None, Any, Any]:
        inner = yield
        task, steps = self, 0
        real = inner.next_step

        def next_step() -> Sequence[Batch]:
            nonlocal steps
            steps += 1
            batches: list[Batch] = real()
            apart = task.fault and torch.distributed.get_rank() == 1
            if steps < 3 or not apart:
                return batches
            return batches[: task.change] if task.change < 0 else [*batches, *batches[: task.change]]

        inner.next_step = next_step
        return inner


@pytest.mark.parametrize("change", [1, -1])
def test_a_loader_that_makes_more_or_fewer_micro_batches_on_one_rank_ends_the_run_with_one_sentence_on_both(
    pool: WorkerPool, change: int
) -> None:
    answers = pool.run(2, said_by, Uneven(change=change), timeout_s=60)
    for rank, (said, step, _) in enumerate(answers):
        assert step == 2
        assert said == (
            f"step 3: the loader made {[4, 4 + change][rank]} micro-batches on rank {rank}, and {8 + change} on all 2 "
            "ranks together; it must make as many on every rank"
        )


def test_a_wrapper_around_the_loader_changes_nothing_by_being_there(pool: WorkerPool) -> None:
    plain, wrapped = (assemble(pool.run(2, train_job, {}, (), task)) for task in (PLAIN, Uneven(fault=False)))
    assert worst_difference(plain, wrapped) == 0


@attrs.frozen
class Growing(RandomTask):
    """A loader of its own, which makes n micro-batches in step n, and keeps a state."""

    @hookimpl
    def femto_loader(self, config: Any, mesh: Any, dataset: Any, collator: Any) -> Loader:
        class Grows:
            accumulation = 6
            identity: dict[str, Any] = {"growing": 1}  # noqa: RUF012
            step = 0

            def next_step(self) -> list[Batch]:
                self.step += 1
                first = self.step * (self.step - 1) // 2 * mesh.size(*mesh.row_axes)
                mine = range(first + mesh.coordinate(*mesh.row_axes), first + 64, mesh.size(*mesh.row_axes))
                return [collator([dataset[row % len(dataset)]]) for row in mine[: self.step]]

            def state_dict(self) -> dict[str, int]:
                return {"step": self.step}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.step = state["step"]

            def close(self) -> None:
                pass

        return Grows()


def growing(folder: str, stop_after: int) -> list[tuple[int, float, int]]:
    place: Values = {"run": {"dir": folder}, "checkpoint": {"resume": "auto"}} if folder else {}
    trainer = make_trainer(merged(place, {"train": {"stop_after": stop_after}}), (), {"task": Growing(masked=0.0)})
    found = []
    while trainer.step < trainer.end:
        info = trainer.train_step()
        found.append((info.step, info.loss, info.tokens))
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    return found


def test_a_loader_of_ones_own_may_make_other_numbers_from_step_to_step_and_is_resumed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    straight, *_ = pool.run(2, growing, "", 6)
    assert [tokens for _, _, tokens in straight] == [2 * 8 * n for n in range(1, 7)]
    halves = [pool.run(2, growing, str(tmp_path), stop)[0] for stop in (3, 6)]
    assert [*halves[0], *halves[1]] == straight


# What layers add to the loss.


@attrs.frozen
class Penalty(RandomTask):
    """Each layer adds a constant to the loss, and a term that pulls its outputs to zero."""

    constant: float = 3.0
    pull: float = 50.0

    @hookimpl
    def femto_wrap_layer(self, layer: Any, stage: Stage) -> None:
        forward = layer.forward

        def adding(hidden: torch.Tensor, **others: Any) -> Any:
            output = forward(hidden, **others)
            stage.side_losses.add(output.new_tensor(self.constant))
            stage.side_losses.add(self.pull * output.square().sum())
            return output

        layer.forward = adding


LAYERS: Values = {"model": {"layers": 4}, "train": {"steps": 3}}
SPLITS: list[tuple[int, tuple[str, ...], Values]] = [
    (1, (), {"data": {"micro_batch": 8}}),
    (1, ("sac",), {"sac": {"policy": "full"}}),
    (1, ("sac",), {"sac": {"policy": "selective"}}),
    (2, (), {}),
    (2, ("sac", "zero3"), {"sac": {"policy": "full"}}),
    (2, ("pp",), {"pp": {"size": 2, "schedule": "1f1b"}}),
    (2, ("pp", "sac"), {"pp": {"size": 2, "schedule": "interleaved"}, "sac": {"policy": "selective"}}),
    (4, ("pp", "sac"), {"pp": {"size": 2, "schedule": "zb"}, "sac": {"policy": "full"}}),
    (2, ("tp", "sac"), {"tp": {"size": 2}, "sac": {"policy": "full"}}),
]


@pytest.fixture(scope="module")
def pulled(pool: WorkerPool) -> Record:
    """One process, a row at a time."""
    return assemble(pool.run(1, train_job, LAYERS, (), Penalty(constant=0.0)))


@pytest.mark.parametrize(("ranks", "plugins", "values"), SPLITS)
def test_what_layers_add_to_the_loss_is_counted_once_and_trained_on_under_every_layout(
    pool: WorkerPool, pulled: Record, ranks: int, plugins: tuple[str, ...], values: Values
) -> None:
    other = assemble(pool.run(ranks, train_job, merged(LAYERS, values), plugins, Penalty(constant=0.0)))
    assert worst_difference(pulled, other) < BOUND


def test_what_layers_add_moves_losses_and_gradients(pool: WorkerPool, pulled: Record) -> None:
    plain = assemble(pool.run(1, train_job, LAYERS, (), PLAIN))
    assert pulled.losses[0] > plain.losses[0] + 0.01
    assert worst_difference(plain, pulled) > 1e-3


def first_losses(plugins: tuple[str, ...], values: Values, task: RandomTask) -> tuple[float, int, float]:
    trainer = make_trainer(merged(LAYERS, values), plugins, {"task": task})
    before = trainer.evaluate()
    info = trainer.train_step()
    trainer.close()
    return info.loss, info.tokens, before


@pytest.mark.parametrize(("ranks", "plugins", "values"), SPLITS[1:])
def test_each_layer_adds_once_a_micro_batch_in_training_and_nothing_in_evaluation(
    pool: WorkerPool, ranks: int, plugins: tuple[str, ...], values: Values
) -> None:
    task = Penalty(constant=3.0, pull=0.0)
    [(plain, _, plain_before), *_] = pool.run(ranks, first_losses, plugins, values, PLAIN)
    for loss, tokens, before in pool.run(ranks, first_losses, plugins, values, task):
        assert loss == pytest.approx(plain + 8 * 4 * task.constant / tokens, rel=1e-12)
        assert before == plain_before


def test_what_a_forward_left_that_nobody_collected_is_forgotten() -> None:
    from femto_core.model import SideLosses

    side = SideLosses()
    assert side.take() is None
    side.add(torch.tensor(2.0))
    side.add(torch.tensor(3.0))
    assert float(side.take() or 0) == 5.0
    assert side.take() is None
    with torch.no_grad():
        side.add(torch.tensor(2.0))
    assert side.take() is None


# Stopping.


@attrs.frozen
class Stops(RandomTask):
    """In step 2 another thread of one rank asks for a stop, as a signal handler or a failed save does."""

    rank: int = 1
    errors: list[Any] = attrs.field(factory=list, eq=False)

    @hookimpl
    def femto_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 2 and trainer.mesh.rank == self.rank:
            asking = threading.Thread(target=trainer.request_stop)
            asking.start()
            asking.join()

    @hookimpl
    def femto_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.errors.append((trainer.step, error))


def stopped(rank: int, folder: str) -> tuple[int, list[Any], list[str]]:
    values: Values = {"run": {"dir": folder}, "checkpoint": {"every": 5}}
    task = Stops(rank=rank)
    trainer = make_trainer(values, (), {"task": task})
    trainer.train()
    trainer.close()
    saved = sorted(path.name for path in (trainer.run_dir / "checkpoints").glob("step-*"))
    return trainer.step, task.errors, saved


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_ranks_request_from_another_thread_stops_all_after_the_step_with_a_checkpoint(
    pool: WorkerPool, tmp_path: Path, rank: int
) -> None:
    for step, errors, saved in pool.run(4, stopped, rank, str(tmp_path / str(rank)), timeout_s=60):
        assert step == 2
        assert errors == [(2, None)], "a request is no error"
        assert len(saved) == 1
        assert int(saved[0].partition("-")[2]) == 2


# Errors, and what observers hear of them.


class Fails(RandomTask):
    """Fails where it is told to, on every rank."""

    where: str = ""
    heard: list[Any] = []  # noqa: RUF012 - emptied by each job

    @hookimpl
    def femto_train_begin(self) -> None:
        self._fail("begin")

    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        if step == 2:
            self._fail("step")

    @hookimpl
    def femto_step_end(self, info: StepInfo) -> None:
        if info.step == 2:
            self._fail("end of step")

    @hookimpl
    def femto_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.heard.append((trainer.step, repr(error)))

    def _fail(self, where: str) -> None:
        if where == Fails.where:
            raise KeyError(where)
        if f"interrupt {where}" == Fails.where:
            raise KeyboardInterrupt


def heard_of(where: str) -> list[Any]:
    task = Fails()
    Fails.where = where
    task.heard.clear()
    trainer = make_trainer({"train": {"stop_after": 3}}, (), {"task": task})
    if where in ("wait", "close"):
        setattr(trainer.checkpointer, where, lambda: task._fail(where))
    try:
        trainer.train()
    except (KeyError, KeyboardInterrupt) as error:
        task.heard.append(repr(error))
    trainer.close()
    return list(task.heard)


@pytest.mark.parametrize(
    ("where", "step", "error"),
    [
        ("", 3, "None"),
        ("begin", 0, "KeyError('begin')"),
        ("step", 1, "KeyError('step')"),
        ("end of step", 2, "KeyError('end of step')"),
        ("interrupt step", 1, "KeyboardInterrupt()"),
        ("wait", 3, "KeyError('wait')"),
        ("close", 3, "KeyError('close')"),
    ],
)
def test_observers_are_given_the_error_that_ended_the_run(pool: WorkerPool, where: str, step: int, error: str) -> None:
    expected = [(step, error), *([error] if error != "None" else [])]
    assert pool.run(2, heard_of, where) == [expected] * 2


# Modes.


def modes() -> list[bool]:
    """Whether dropout is on: after an evaluation, and a sample, that raised; and where it was off before."""
    trainer = make_trainer({}, (), {"task": DropoutTask()})
    seen = []

    def fail(*_: Any) -> Any:
        seen.append(trainer.stage.module.training)
        raise MemoryError("out of memory")

    real: Any = trainer.schedule.forward
    for was in (True, False):
        trainer.stage.train(was)
        trainer.schedule.forward = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(MemoryError):
            trainer.evaluate()
        seen.append(trainer.stage.module.training)
        with pytest.raises(MemoryError):
            continue_tokens(trainer, [1, 2], count=2, temperature=0.0, seed=0, end_id=None)
        seen.append(trainer.stage.module.training)
        trainer.schedule.forward = real  # type: ignore[method-assign]
        trainer.evaluate()
        continue_tokens(trainer, [1, 2], count=2, temperature=0.0, seed=0, end_id=None)
        seen.append(trainer.stage.module.training)
    inside = [module for body in trainer.stage._bodies for module in body.modules()]
    bodies = {module.training for module in inside if not isinstance(module, nn.ModuleList)}
    trainer.close()
    return [*seen, *bodies]


def test_evaluation_and_sampling_leave_dropout_as_it_was_even_where_they_raise(pool: WorkerPool) -> None:
    for answer in pool.run(2, modes):
        assert answer == [False, True, False, True, True, False, False, False, False, False, False]


# The seats of a loss.


@attrs.frozen
class Counting:
    """Wraps the token statistics and counts what a loss asks for."""

    asked: list[str] = attrs.field(factory=list, eq=False)

    @hookimpl(wrapper=True)
    def femto_token_statistics(self) -> Generator[None, TokenStatistics, Any]:
        inner = yield
        asked = self.asked

        class Counted:
            def cross_entropy(self, *arguments: Any, **named: Any) -> torch.Tensor:
                asked.append("cross_entropy")
                return inner.cross_entropy(*arguments, **named)

            def log_probs(self, *arguments: Any, **named: Any) -> Any:
                asked.append("log_probs")
                return inner.log_probs(*arguments, **named)

        return Counted()


class ByLogProbs(RandomTask):
    """Cross-entropy made of log-probabilities."""

    @hookimpl
    def femto_loss(self) -> CrossEntropy:
        class FromLogProbs(CrossEntropy):
            def __call__(
                self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
            ) -> torch.Tensor:
                return -statistics.log_probs(hidden, head, batch.targets).log_probs.sum()

        return FromLogProbs()


def counted(task: RandomTask) -> tuple[dict[str, Any], list[str]]:
    from femto_tools.testing import record_training

    counting = Counting()
    trainer = make_trainer({}, (), {"task": task, "counting": counting})
    return record_training(trainer), counting.asked


def test_a_loss_gets_the_statistics_of_the_seat_wrapped_or_not(pool: WorkerPool) -> None:
    plain = assemble(pool.run(2, train_job, {}, (), PLAIN))
    for task, asks in ((PLAIN, "cross_entropy"), (ByLogProbs(), "log_probs")):
        answers = pool.run(2, counted, task)
        assert worst_difference(plain, assemble([part for part, _ in answers])) < BOUND
        assert [asked for _, asked in answers] == [[asks] * 24] * 2
