"""Interrupted and resumed runs for the tests of checkpoints: jobs for the pool of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from femto_core.batch import Batch
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.metrics import StepInfo
from femto_core.trainer import Trainer
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.conftest import DropoutTask

Values = dict[str, dict[str, Any]]
ROWS = 20


def values(folder: Path, resume: str = "none", /, **changes: Mapping[str, Any]) -> Values:
    """Two steps an epoch, four micro-batches a step on two ranks; a run in `folder`/test."""
    base: Values = {
        "run": {"dir": str(folder)},
        "checkpoint": {"resume": resume},
        "train": {"steps": 7},
        "data": {"micro_batch": 1},
        "eval": {"rows": 3},
    }
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in {*base, *changes}}


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "test" / "checkpoints" / f"step-{step}"


@attrs.frozen
class Seen:
    """One rank's record of a run."""

    infos: list[StepInfo]
    held_out: list[float]
    """The held-out loss after each step."""
    state: dict[str, torch.Tensor]
    """Weights and optimizer state at the end."""
    counters: tuple[int, int, int]
    random: torch.Tensor
    rows: list[int]
    """The number of each row that was read, in order."""


@attrs.frozen(eq=False)
class RememberingTask(RandomTask):
    """Random rows, with a record of the rows that were trained on."""

    read: list[int] = attrs.field(factory=list)

    @hookimpl
    def femto_collator(self) -> Callable[[Any], Batch]:
        known = {fingerprint(row): number for number, row in enumerate(self.all_rows())}

        def collate(samples: list[Batch]) -> Batch:
            [sample] = samples
            if (number := known.get(fingerprint(sample))) is not None:
                self.read.append(number)
            return sample

        return collate

    def all_rows(self) -> list[Batch]:
        rows = self.femto_dataset(_Sizes, "train")
        return [rows[index] for index in range(len(rows))]


class _Sizes:
    """The parts of a config that the task reads, as in femto_tools.testing.TINY."""

    class data:  # noqa: N801
        seq_len = 8

    class model:  # noqa: N801
        vocab_size = 32


def fingerprint(row: Batch) -> tuple[int, ...]:
    return tuple(row.input_ids.flatten().tolist())


class RememberingDropout(DropoutTask, RememberingTask):
    """The same with dropout."""


def run(settings: Values, first: int, last: int, save_at: int | None = None, dropout: bool = True) -> Seen:
    """Train from step `first`, at which the checkpoint must resume, to `last`."""
    task = (RememberingDropout if dropout else RememberingTask)(rows=ROWS)
    torch.manual_seed(dist.get_rank() + 1000 * (first + 1))  # a resumed process has another random state
    trainer = make_trainer(settings, (), {"random_task": task})
    assert trainer.step == first
    infos, held_out = [], []
    while trainer.step < last:
        infos.append(trainer.train_step())
        held_out.append(trainer.evaluate())
        if trainer.step == save_at:
            trainer.save()
    trainer.checkpointer.wait()
    seen = Seen(
        infos=[attrs.evolve(info, seconds=0.0) for info in infos],
        held_out=held_out,
        state=everything(trainer),
        counters=(trainer.step, trainer.skipped, trainer.tokens_seen),
        random=torch.get_rng_state(),
        rows=list(task.read),
    )
    trainer.close()
    return seen


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {g.name: g.master.detach().clone() for g in trainer.shares}
    for group in trainer.shares:
        for key, value in trainer.optimizer.state[group.master].items():
            found[f"{key} of {group.name}"] = torch.as_tensor(value).clone()
    return found


def attempt(settings: Values) -> str:
    """Return the step at which a run resumes, or the error sentence."""
    try:
        trainer = make_trainer(settings)
    except UserError as error:
        return str(error)
    trainer.close()
    return f"resumed at {trainer.step}"


def refusal(pool: WorkerPool, settings: Values, size: int = 2) -> str:
    """The error sentence, equal on all ranks, so that no rank resumes alone."""
    answers = pool.run(size, attempt, settings, timeout_s=60)
    assert not any(answer.startswith("resumed") for answer in answers), answers
    assert len(set(answers)) == 1, answers
    assert "\n" not in answers[0]
    return str(answers[0])


def train_until(settings: Values, last: int) -> list[str]:
    """Train up to step `last`, saving after every step; return the checkpoints that are left."""
    trainer = make_trainer(settings)
    while trainer.step < last:
        trainer.train_step()
        trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    return sorted(path.name for path in (trainer.run_dir / "checkpoints").glob("step-*"))
