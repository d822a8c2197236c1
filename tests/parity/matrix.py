"""Combinations of everything: which are tried, and how one of them trains."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch

from femto_core.trainer import Trainer
from femto_ops import collectives
from femto_tools.testing import RandomTask, Record, make_trainer, record_training
from femto_tools.verify import BOUND, compare

Values = dict[str, dict[str, Any]]
AXES: dict[str, tuple[Any, ...]] = {
    "schedule": ("none", "gpipe", "1f1b", "interleaved", "zb"),
    "zero": (0, 1, 2, 3),
    "tp": ("none", "tp", "sp"),
    "dp": (2, 1),
    "sac": ("none", "full", "selective"),
    "tied": (True, False),
    "packed": (True, False),
    "rows": (1, 2, 4),
    "masters": (True, False),
}
"""Rows: of a micro-batch; masters: apart from the weights that compute."""
TOGETHER = ("schedule", "zero", "tp")
"""Of these, every triple is tried; of all others, every pair."""


@attrs.frozen
class Case:
    """One combination."""

    schedule: str
    zero: int
    tp: str
    dp: int
    sac: str
    tied: bool
    packed: bool
    rows: int
    masters: bool

    @property
    def ranks(self) -> int:
        return self.dp * (1 if self.schedule == "none" else 2) * (1 if self.tp == "none" else 2)

    @property
    def plugins(self) -> tuple[str, ...]:
        wanted = {
            "pp": self.schedule != "none",
            "tp": self.tp != "none",
            f"zero{self.zero}": self.zero > 0,
            "sac": self.sac != "none",
            "bf16": self.masters,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def values(self) -> Values:
        sections: Values = {
            "pp": {"size": 2, "schedule": self.schedule},
            "tp": {"size": 2, "sequence_parallel": self.tp == "sp"},
            "zero": {} if self.zero == 3 else {"bucket_mib": 0.006},
            "sac": {"policy": self.sac},
        }
        names = {plugin.rstrip("123") for plugin in self.plugins}
        own = {name: section for name, section in sections.items() if name in names}
        return {**problem(self.tied), "data": {"micro_batch": self.rows}, **own}

    @property
    def task(self) -> RandomTask:
        return RandomTask(documents=3 if self.packed else 1)

    def __str__(self) -> str:
        parts = [f"dp{self.dp}", self.tp.replace("none", ""), self.schedule.replace("none", "")]
        parts += [f"zero{self.zero}" * (self.zero > 0), self.sac.replace("none", ""), "tied" * self.tied]
        parts += ["packed" * self.packed, f"rows{self.rows}", "masters" * self.masters]
        return "-".join(filter(None, parts))


def problem(tied: bool) -> Values:
    """The model that all of them train; interleaving wants four layers."""
    return {"model": {"layers": 4, "tied": tied}, "train": {"steps": 2}}


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(attrs.asdict(case).items(), 2))


def all_cases() -> list[Case]:
    return [Case(*levels) for levels in itertools.product(*AXES.values())]


@functools.cache
def covering_cases() -> tuple[Case, ...]:
    """Every triple of `TOGETHER`, and every pair of anything, with as few cases as a greedy choice finds."""
    everything = all_cases()
    missing = set().union(*map(pairs_of, everything))
    chosen: list[Case] = []

    def choose(candidates: list[Case]) -> None:
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing.difference_update(pairs_of(best))

    for levels in itertools.product(*(AXES[name] for name in TOGETHER)):
        # Where ZeRO has something to shard: with one data parallel rank it has not.
        choose([c for c in everything if (c.schedule, c.zero, c.tp) == levels and (c.dp == 2 or not c.zero)])
    while missing:
        choose(everything)
    return tuple(chosen)


def train(case: Case, fault: str = "") -> dict[str, Any]:
    """Train as a worker's job, with a fault where one is named."""
    trainer = make_trainer(case.values, case.plugins, {"random_task": case.task})
    with FAULTS[fault](trainer) if fault else contextlib.nullcontext():
        return record_training(trainer)


def what_differs(one: Record, several: Record) -> str:
    """Return the first thing that differs, and by how much; nothing where all is equal."""
    wrong = [found for found in compare(one, several) if not found.worst < BOUND]
    return f"{wrong[0].what} by {wrong[0].worst:.1e} ({len(wrong)} differ)" if wrong else ""


# Saving under one layout, going on under another.


def save_half(case: Case, folder: Path) -> None:
    """Train half of four steps as a worker's job, and save."""
    trainer = make_trainer(with_place(case, folder), case.plugins, {"random_task": case.task})
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()


def go_on(case: Case, folder: Path) -> dict[str, Any]:
    """Train the other half."""
    trainer = make_trainer(with_place(case, folder), case.plugins, {"random_task": case.task})
    assert trainer.step == 2
    return record_training(trainer)


def with_place(case: Case, folder: Path) -> Values:
    place: Values = {"run": {"dir": str(folder)}, "checkpoint": {"resume": "auto"}}
    return {**case.values, **place, "train": {"steps": 4, "stop_after": 2}}


# Faults.


@attrs.frozen
class Arrived:
    def wait(self) -> None:
        pass


@contextlib.contextmanager
def one_bucket_not_summed(trainer: Trainer) -> Iterator[None]:
    """Every rank keeps its own sum of the third bucket."""
    real, calls = collectives.reduce_scatter, 0

    def reduce_scatter(whole: torch.Tensor, share: torch.Tensor, group: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != 3:
            return real(whole, share, group)
        share.copy_(whole.view(group.size(), -1)[group.rank()])
        return Arrived()

    with mock.patch.object(collectives, "reduce_scatter", reduce_scatter):
        yield


@contextlib.contextmanager
def one_norm_counted_twice(trainer: Trainer) -> Iterator[None]:
    """Both tensor parallel ranks count the gradient of a weight that both have."""
    groups: Any = trainer.shares
    for place, group in enumerate(groups):
        if group.name.endswith("input_layernorm.weight"):
            groups[place] = attrs.evolve(group, layout=attrs.evolve(group.layout, replicated=frozenset()))
    yield


@contextlib.contextmanager
def last_micro_batch_dropped(trainer: Trainer) -> Iterator[None]:
    with changed_batches(trainer, lambda batches: batches[:-1]):
        yield


@contextlib.contextmanager
def one_document_leaked(trainer: Trainer) -> Iterator[None]:
    """In the first micro-batch, documents are one."""

    def join(batches: list[Any]) -> list[Any]:
        first = batches[0]
        positions = torch.arange(first.position_ids.shape[1]).expand_as(first.position_ids)
        return [attrs.evolve(first, position_ids=positions), *batches[1:]]

    with changed_batches(trainer, join):
        yield


def changed_batches(trainer: Trainer, change: Callable[[list[Any]], list[Any]]) -> Any:
    real = trainer.loader.next_step

    def changed() -> list[Any]:
        return change(list(real()))

    return mock.patch.object(trainer.loader, "next_step", changed)


FAULTS: dict[str, Callable[[Trainer], contextlib.AbstractContextManager[None]]] = {
    "one bucket not summed": one_bucket_not_summed,
    "one norm counted twice": one_norm_counted_twice,
    "last micro-batch dropped": last_micro_batch_dropped,
    "one document leaked": one_document_leaked,
}
