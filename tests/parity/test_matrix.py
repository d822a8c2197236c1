"""Any combination of parallelisms gives the numbers of one process; faults put in on purpose are seen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from femto_tools.testing import Record, WorkerPool, assemble, train_job
from tests.parity.matrix import (
    AXES,
    TOGETHER,
    Case,
    all_cases,
    covering_cases,
    go_on,
    pairs_of,
    problem,
    save_half,
    train,
    what_differs,
)

CASES = covering_cases()
SMALL = [case for case in CASES if case.ranks <= 4]
LARGE = [case for case in CASES if case.ranks == 8]


@pytest.fixture(scope="module")
def whole_batches(pool: WorkerPool) -> Callable[..., Record]:
    """Train a case's problem in one process on whole global batches; each problem once."""
    known: dict[tuple[bool, bool, int], Record] = {}

    def train_once(case: Case, steps: int = 2) -> Record:
        key = (case.tied, case.packed, steps)
        if key not in known:
            values = {**problem(case.tied), "data": {"micro_batch": 8}, "train": {"steps": steps}}
            known[key] = assemble(pool.run(1, train_job, values, (), case.task))
        return known[key]

    return train_once


def test_every_pair_and_every_triple_of_schedule_stage_and_tensor_parallelism_is_tried() -> None:
    covered = set().union(*map(pairs_of, CASES))
    assert covered == set().union(*map(pairs_of, all_cases()))
    triples = {tuple(getattr(case, name) for name in TOGETHER) for case in CASES if case.dp == 2 or not case.zero}
    assert triples == set(itertools.product(*(AXES[name] for name in TOGETHER)))
    assert len(CASES) < 80
    assert {case.ranks for case in CASES} == {1, 2, 4, 8}


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_combination_trains_as_one_process(
    pool: WorkerPool, whole_batches: Callable[..., Record], case: Case
) -> None:
    several = assemble(pool.run(case.ranks, train, case))
    assert not (found := what_differs(whole_batches(case), several)), f"{case}: {found}"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_a_combination_of_three_axes_trains_as_one_process(
    large_pool: WorkerPool, whole_batches: Callable[..., Record], case: Case
) -> None:
    several = assemble(large_pool.run(8, train, case))
    assert not (found := what_differs(whole_batches(case), several)), f"{case}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("dp", AXES["dp"])
@pytest.mark.parametrize("tp", AXES["tp"])
@pytest.mark.parametrize("zero", AXES["zero"])
@pytest.mark.parametrize("schedule", AXES["schedule"])
def test_the_full_product(
    large_pool: WorkerPool, whole_batches: Callable[..., Record], schedule: str, zero: int, tp: str, dp: int
) -> None:
    """All 8640 cases take hours."""
    for case in all_cases():
        if (case.schedule, case.zero, case.tp, case.dp) == (schedule, zero, tp, dp):
            several = assemble(large_pool.run(case.ranks, train, case))
            assert not (found := what_differs(whole_batches(case), several)), f"{case}: {found}"


PLAIN = Case(schedule="none", zero=0, tp="none", dp=2, sac="none", tied=True, packed=True, rows=1, masters=False)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("one bucket not summed", attrs.evolve(PLAIN, zero=2)),
        ("one bucket not summed", attrs.evolve(PLAIN, zero=3, schedule="1f1b")),
        ("one norm counted twice", attrs.evolve(PLAIN, tp="tp", dp=1)),
        ("one norm counted twice", attrs.evolve(PLAIN, tp="tp", zero=2)),
        ("last micro-batch dropped", attrs.evolve(PLAIN, schedule="zb", dp=1)),
        ("last micro-batch dropped", attrs.evolve(PLAIN, schedule="interleaved", zero=3)),
        ("one document leaked", attrs.evolve(PLAIN, tp="sp", schedule="gpipe", dp=1)),
        ("one document leaked", attrs.evolve(PLAIN, zero=1, sac="full")),
    ],
    ids=str,
)
def test_a_fault_is_seen(pool: WorkerPool, whole_batches: Callable[..., Record], fault: str, case: Case) -> None:
    sound, faulty = (assemble(pool.run(case.ranks, train, case, name)) for name in ("", fault))
    assert not what_differs(whole_batches(case), sound), "or the fault would not be what is seen"
    assert what_differs(whole_batches(case), faulty)


def drawn_pairs(count: int) -> list[tuple[Case, Case]]:
    """Pairs of cases that train the same problem, drawn at random, the same ones every time."""
    draw = random.Random(2024)
    pairs = [(a, b) for a in SMALL for b in SMALL if a != b and (a.tied, a.packed) == (b.tied, b.packed)]
    return draw.sample(pairs, count)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("first", "then"), drawn_pairs(30), ids=str)
def test_what_one_combination_saved_another_goes_on_with(
    pool: WorkerPool, whole_batches: Callable[..., Record], tmp_path: Path, first: Case, then: Case
) -> None:
    pool.run(first.ranks, save_half, first, tmp_path)
    several = assemble(pool.run(then.ranks, go_on, then, tmp_path))
    one = whole_batches(then, 4)
    rest = attrs.evolve(one, losses=one.losses[2:], norms=one.norms[2:], gradients=one.gradients[2:])
    assert not (found := what_differs(rest, several)), f"{first}, then {then}: {found}"
