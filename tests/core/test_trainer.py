"""The trainer where something is off: values that are not finite, nothing to learn, odd starts, early ends."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from femto_core.batch import Batch
from femto_core.config import Config
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.loss import CrossEntropy, TokenStatistics
from femto_core.mesh import Axis, Mesh
from femto_core.metrics import StepInfo
from femto_core.model import FullModel, Stage
from femto_core.precision import ParamShare, Precision
from femto_core.replicated import Replicated
from femto_core.sharding import ShardingStrategy
from femto_core.trainer import Trainer
from femto_tools.testing import (
    RandomTask,
    WorkerPool,
    assemble,
    make_trainer,
    stack_batches,
    train_job,
    worst_difference,
)
from tests.conftest import DropoutTask

PLAIN = RandomTask()
BAD_STEP = 3


# Values that are not finite.


@attrs.frozen
class PoisonedLoss(RandomTask):
    """In step 3 the loss of one rank's last micro-batch is multiplied by `value`."""

    value: float = math.nan
    rank: int = 1

    @hookimpl
    def femto_loss(self, mesh: Mesh) -> CrossEntropy:
        calls, task = 0, self
        micro_batches = 8 // mesh.size("dp")

        class Poisoned(CrossEntropy):
            def __call__(
                self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
            ) -> torch.Tensor:
                nonlocal calls
                calls += 1
                right = super().__call__(statistics, hidden, head, batch)
                return right * task.value if calls == BAD_STEP * micro_batches and mesh.rank == task.rank else right

        return Poisoned()


@attrs.frozen
class PoisonedGradient(RandomTask):
    """In step 3, after reduction, one rank's gradient of one parameter holds one `value`; every loss is finite.

    The ranks lie along an axis of their own, each speaking for a part of the model, as stages of a pipeline do.
    """

    value: float = math.nan
    rank: int = 1

    @hookimpl
    def femto_mesh_axes(self) -> Sequence[Axis]:
        return [Axis("part", 2, 10, "nothing")]

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        task = self

        class Poisoned(Replicated):
            steps = 0

            def allocate(self, stage: Stage, precision: Precision) -> list[ParamShare]:
                alone = frozenset({"dp"})
                shares = super().allocate(stage, precision)
                self.shares = [attrs.evolve(s, layout=attrs.evolve(s.layout, replicated=alone)) for s in shares]
                return self.shares

            def finish_gradients(self) -> None:
                super().finish_gradients()
                self.steps += 1
                if self.steps == BAD_STEP and mesh.rank == task.rank:
                    gradient = self.shares[-1].compute.grad
                    assert gradient is not None
                    gradient.view(-1)[0] = task.value

        return Poisoned(mesh, 25.0)


@attrs.frozen
class Watched:
    """What a run of six steps looked like to one rank."""

    infos: list[StepInfo]
    weights: list[dict[str, torch.Tensor]]
    """Before the first step, and after each."""
    state_is_finite: bool
    gradients_left: int


def watch(task: RandomTask, values: dict[str, Any] | None = None) -> Watched:
    trainer = make_trainer(values or {}, (), {"random_task": task})
    weights, infos = [copied(trainer)], []
    for _ in range(6):
        infos.append(trainer.train_step())
        weights.append(copied(trainer))
    state = [t for entry in trainer.optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    assert trainer.step == 6
    assert trainer.skipped == infos[-1].skipped_total
    assert trainer.tokens_seen == sum(info.tokens for info in infos)
    left = sum(p.grad is not None for _, p in trainer.stage.named_parameters())
    trainer.close()
    return Watched(infos, weights, all(bool(t.isfinite().all()) for t in state), left)


def copied(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {share.name: share.master.detach().clone() for share in trainer.shares}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


POISONS = [
    PoisonedLoss(value=math.nan),
    PoisonedLoss(value=math.inf),
    PoisonedLoss(value=-math.inf, rank=0),
    PoisonedGradient(value=math.nan, rank=0),
    PoisonedGradient(value=math.nan, rank=1),
    PoisonedGradient(value=math.inf, rank=1),
]


@pytest.mark.parametrize("task", POISONS, ids=lambda t: f"{type(t).__name__} {t.value} on rank {t.rank}")
def test_a_value_that_is_not_finite_on_one_rank_skips_the_step_on_all(pool: WorkerPool, task: RandomTask) -> None:
    for seen in pool.run(2, watch, task, timeout_s=60):
        flags = [info.skipped for info in seen.infos]
        assert flags == [step == BAD_STEP for step in range(1, 7)]
        assert [info.skipped_total for info in seen.infos] == [0, 0, 1, 1, 1, 1]
        assert not math.isfinite(seen.infos[BAD_STEP - 1].grad_norm)
        assert math.isfinite(seen.infos[BAD_STEP].grad_norm)
        changed = [not same(*pair) for pair in zip(seen.weights, seen.weights[1:], strict=False)]
        assert changed == [not flag for flag in flags]
        assert all(bool(w.isfinite().all()) for w in seen.weights[-1].values())
        assert seen.state_is_finite
        assert seen.gradients_left == 0


def test_a_gradient_may_be_bad_where_every_loss_is_finite(pool: WorkerPool) -> None:
    for seen in pool.run(2, watch, PoisonedGradient()):
        assert all(math.isfinite(info.loss) for info in seen.infos)


def test_after_a_skipped_step_training_goes_on_as_without_it(pool: WorkerPool) -> None:
    """The skipped step uses up its rows and its place in the schedule, and nothing else: step 4 is as good as new."""
    [skipped] = pool.run(1, watch, PoisonedLoss(rank=0), {"optim": {"schedule": "constant"}})
    [plain] = pool.run(1, watch, PLAIN, {"optim": {"schedule": "constant"}})
    assert same(skipped.weights[3], plain.weights[2])
    assert [info.loss for info in skipped.infos[:2]] == [info.loss for info in plain.infos[:2]]
    assert [info.lr for info in skipped.infos] == [info.lr for info in plain.infos]
    assert [info.tokens for info in skipped.infos] == [info.tokens for info in plain.infos]


# Nothing to learn.


class MaskedAtFirst(RandomTask):
    """Eight rows without a target, and then eight ordinary ones."""

    @hookimpl
    def femto_collator(self) -> Callable[[Sequence[Any]], Batch]:
        calls = 0

        def collate(samples: Sequence[Batch]) -> Batch:
            nonlocal calls
            calls += 1
            batch = stack_batches(samples)
            return attrs.evolve(batch, targets=torch.full_like(batch.targets, -100)) if calls <= 4 else batch

        return collate


def test_a_step_without_a_valid_target_leaves_the_weights_and_says_so(pool: WorkerPool) -> None:
    for seen in pool.run(2, watch, MaskedAtFirst()):
        first, second = seen.infos[:2]
        assert math.isnan(first.loss), "a loss of 0.0 would look like success"
        assert (first.tokens, first.skipped, first.skipped_total) == (0, True, 1)
        assert same(seen.weights[0], seen.weights[1])
        assert math.isfinite(second.loss)
        assert (second.skipped, second.skipped_total) == (False, 1)
        assert not same(seen.weights[1], seen.weights[2])


def test_a_run_without_any_target_never_moves(pool: WorkerPool) -> None:
    for seen in pool.run(2, watch, RandomTask(masked=1.0)):
        assert [info.skipped_total for info in seen.infos] == [1, 2, 3, 4, 5, 6]
        assert same(seen.weights[0], seen.weights[-1])


# Starts.


def first_loss(tied: bool) -> float:
    values = {
        "model": {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "tied": tied},
        "data": {"seq_len": 64},
    }
    trainer = make_trainer(values, (), {"random_task": RandomTask(masked=0.0)})
    loss = trainer.train_step().loss
    trainer.close()
    return loss


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_near_the_logarithm_of_the_vocabulary(pool: WorkerPool, tied: bool) -> None:
    assert pool.run(1, first_loss, tied)[0] == pytest.approx(math.log(1000), abs=0.1)


def weights_after_dice(seed: int) -> dict[str, torch.Tensor]:
    """Each rank has thrown its dice differently before the trainer is built."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(1234 + 99 * rank)
    torch.rand(17 * rank + 1)
    trainer = make_trainer({"train": {"seed": seed}, "model": {"tied": False}})
    trainer.close()
    return copied(trainer)


def test_ranks_start_from_the_same_weights_whatever_their_random_state(pool: WorkerPool) -> None:
    first, *others = pool.run(4, weights_after_dice, 0)
    assert all(same(first, other) for other in others)
    [alone] = pool.run(1, weights_after_dice, 0)
    assert same(first, alone)
    [another] = pool.run(1, weights_after_dice, 1)
    assert not any(torch.equal(first[name], another[name]) for name in first if "norm" not in name)


def rotary_frequencies() -> tuple[torch.Tensor, torch.Tensor]:
    trainer = make_trainer({"model": {"hidden_size": 32}})
    rotary = trainer.stage.body.rotary_emb
    trainer.close()
    return rotary.inv_freq, rotary.original_inv_freq


def test_rotary_frequencies_are_the_formula_on_every_rank(pool: WorkerPool) -> None:
    formula = torch.tensor([10000.0 ** (-i / 8) for i in range(0, 8, 2)])
    for frequencies in pool.run(4, rotary_frequencies):
        for one in frequencies:
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, formula, rtol=1e-6, atol=0)


# Ends.


class Listener(RandomTask):
    """Counts what the trainer reports."""

    heard: list[Any] = []  # noqa: RUF012 - emptied by each job

    @hookimpl
    def femto_train_begin(self) -> None:
        self.heard.append("begin")

    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        self.heard.append(("before", step))

    @hookimpl
    def femto_step_end(self, info: StepInfo) -> None:
        self.heard.append(("after", info.step))

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        self.heard.append(("log", step, *sorted(metrics.keys() & {"loss", "held_out_loss"})))

    @hookimpl
    def femto_train_end(self) -> None:
        self.heard.append("end")


def train_and_listen(values: dict[str, Any]) -> tuple[list[Any], int, dict[str, torch.Tensor]]:
    listener = Listener()
    listener.heard.clear()
    trainer = make_trainer(values, (), {"random_task": listener})
    trainer.train()
    assert trainer.stage.module.training
    trainer.close()
    return list(listener.heard), trainer.step, copied(trainer)


def test_stop_after_ends_a_run_early_and_cleanly_without_bending_its_schedule(pool: WorkerPool) -> None:
    stopped = pool.run(2, train_and_listen, {"train": {"stop_after": 3}, "eval": {"every": 2, "rows": 4}})
    logs: list[Any] = [[("log", 1, "loss")], [("log", 2, "loss"), ("log", 2, "held_out_loss")], []]
    logs[2] = [("log", 3, "loss"), ("log", 3, "held_out_loss")]
    for rank, (heard, step, _) in enumerate(stopped):
        steps = [
            event
            for number in (1, 2, 3)
            for event in (("before", number), ("after", number), *(logs[number - 1] if rank == 0 else []))
        ]
        assert heard == ["begin", *steps, "end"]
        assert step == 3
    [whole] = pool.run(1, watch, PLAIN)
    one = stopped[0][2]
    worst = max(float((one[name] - whole.weights[3][name]).abs().max()) for name in one)
    assert worst < 1e-12


def test_zero_means_to_the_end(pool: WorkerPool) -> None:
    [(heard, step, _)] = pool.run(1, train_and_listen, {"train": {"stop_after": 0}})
    assert (step, heard[-2]) == (6, ("log", 6, "loss"))


class Fails(Listener):
    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        if step == 2:
            raise KeyError("a plugin's own")


def train_until_failure() -> list[Any]:
    listener = Fails()
    listener.heard.clear()
    trainer = make_trainer({}, (), {"random_task": listener})
    with pytest.raises(KeyError):
        trainer.train()
    trainer.close()
    return list(listener.heard)


def test_observers_hear_the_end_after_an_exception_too(pool: WorkerPool) -> None:
    for heard in pool.run(2, train_until_failure):
        assert heard[-1] == "end"
        assert heard.count("end") == 1


class FailsToBegin:
    @hookimpl
    def femto_train_begin(self) -> None:
        raise KeyError("a plugin's own")


def end_after_a_failure_to_begin() -> list[Any]:
    listener = Listener()
    listener.heard.clear()
    trainer = make_trainer({}, (), {"failing": FailsToBegin(), "random_task": listener})  # the last named begins first
    with pytest.raises(KeyError):
        trainer.train()
    trainer.close()
    return list(listener.heard)


def test_those_who_heard_the_beginning_hear_the_end_where_another_fails_to_begin(pool: WorkerPool) -> None:
    assert pool.run(2, end_after_a_failure_to_begin) == [["begin", "end"]] * 2


def end_after_a_failure_to_close() -> list[Any]:
    listener = Listener()
    listener.heard.clear()
    trainer = make_trainer({"train": {"stop_after": 1}}, (), {"random_task": listener})

    def close() -> None:
        raise OSError("the disk is gone")

    trainer.checkpointer.close = close  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    trainer.close()
    return list(listener.heard)


def test_observers_hear_the_end_where_the_checkpointer_fails_to_close(pool: WorkerPool) -> None:
    [heard] = pool.run(1, end_after_a_failure_to_close)
    assert heard[-1] == "end"


class CountsSteps(RandomTask):
    """Counts steps when they end, and keeps the count in checkpoints."""

    counted: list[int] = []  # noqa: RUF012 - emptied by each job

    @hookimpl
    def femto_step_end(self) -> None:
        self.counted.append(1)

    @hookimpl
    def femto_checkpoint_state(self) -> tuple[str, Any]:
        return "counted", self

    def state_dict(self) -> dict[str, int]:
        return {"count": len(self.counted)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counted.extend([1] * state["count"])


def count_of_a_resumed_run(folder: str) -> tuple[int, int]:
    values = {"run": {"dir": folder}, "checkpoint": {"every": 2, "resume": "auto"}, "train": {"stop_after": 4}}
    for _ in range(2):
        task = CountsSteps()
        task.counted.clear()
        trainer = make_trainer(values, (), {"random_task": task})
        found = trainer.step, len(task.counted)
        trainer.train()
        trainer.close()
    return found


def test_a_checkpoint_keeps_what_plugins_made_of_its_own_step(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(1, count_of_a_resumed_run, str(tmp_path)) == [(4, 4)]


def folders_of_trainers() -> tuple[Path, Path, bool]:
    trainer = make_trainer({})
    during = trainer.run_dir.is_dir()
    torch.distributed.barrier()
    trainer.close()
    with pytest.raises(UserError) as refused:
        make_trainer({"data": {"global_batch": 7}}, (), {"random_task": FolderOfRefused()})
    return trainer.run_dir, Path(str(refused.value)), during


class FolderOfRefused(RandomTask):
    @hookimpl
    def femto_model(self, config: Config) -> FullModel:
        raise UserError(config.run.dir)


def test_a_trainer_for_tests_leaves_no_folder_behind(pool: WorkerPool) -> None:
    for closed, refused, during in pool.run(2, folders_of_trainers):
        assert during
        assert not closed.parent.exists()
        assert not refused.exists()


def weights_with_evaluation(every: int) -> dict[str, torch.Tensor]:
    trainer = make_trainer({"eval": {"every": every, "rows": 3}}, (), {"random_task": DropoutTask()})
    trainer.train()
    trainer.close()
    return copied(trainer)


def test_evaluation_leaves_training_as_it_is_dropout_included(pool: WorkerPool) -> None:
    for plain, evaluated in zip(
        pool.run(2, weights_with_evaluation, 0), pool.run(2, weights_with_evaluation, 1), strict=True
    ):
        assert same(plain, evaluated)


def evaluate_twice() -> tuple[float, float]:
    trainer = make_trainer({"eval": {"rows": 5}}, (), {"random_task": DropoutTask()})
    answer = trainer.evaluate(), trainer.evaluate()
    trainer.close()
    return answer


def test_evaluation_drops_nothing_and_so_repeats_itself(pool: WorkerPool) -> None:
    [(first, second)] = pool.run(1, evaluate_twice)
    assert first == second


# Recomputation.


@attrs.frozen
class Recomputing(DropoutTask):
    """Every layer is recomputed in backward; dropout, and a frozen start, where asked for."""

    recompute: bool = True
    dropout: bool = False
    frozen: bool = False

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        if self.dropout:
            DropoutTask.femto_transform_model(self, model)
        if self.frozen:
            model.module.model.embed_tokens.weight.requires_grad_(False)
            for parameter in model.module.model.layers[0].parameters():
                parameter.requires_grad_(False)

    @hookimpl
    def femto_wrap_layer(self, layer: Any) -> None:
        if self.recompute:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen start"])
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_recomputation_changes_no_bit_of_a_run(pool: WorkerPool, dropout: bool, frozen: bool) -> None:
    values = {"model": {"tied": False}}
    runs = [
        pool.run(2, train_job, values, (), Recomputing(recompute=on, dropout=dropout, frozen=frozen))
        for on in (False, True)
    ]
    for plain, again in zip(*runs, strict=True):
        assert plain["losses"] == again["losses"]
        assert plain["norms"] == again["norms"]
        assert same(plain["weights"], again["weights"])
        assert len(plain["gradients"]) == len(again["gradients"]) == 6
        for one, other in zip(plain["gradients"], again["gradients"], strict=True):
            assert same(one, other)
            assert ("model.layers.0.mlp.up_proj.weight" in one) is not frozen
            assert one["model.layers.1.mlp.up_proj.weight"].abs().max() > 0


def test_frozen_parameters_do_not_move_and_do_not_count(pool: WorkerPool) -> None:
    values, task = {"model": {"tied": False}}, Recomputing(frozen=True)
    one, two = (assemble(pool.run(size, train_job, values, (), task)) for size in (1, 2))
    assert worst_difference(one, two) < 1e-9
    [start] = pool.run(1, weights_after_dice, 0)
    frozen = {name for name in start if name.startswith(("model.layers.0.", "model.embed_tokens."))}
    assert frozen
    for name, weight in one.weights.items():
        assert torch.equal(weight, start[name].to(weight.dtype)) is (name in frozen), name


def test_dropout_differs_between_ranks_and_does_something(pool: WorkerPool) -> None:
    plain = assemble(pool.run(1, train_job, {}, (), PLAIN))
    dropped = assemble(pool.run(1, train_job, {}, (), DropoutTask()))
    assert plain.losses != dropped.losses
    two = assemble(pool.run(2, train_job, {}, (), DropoutTask()))
    assert two.losses != dropped.losses
