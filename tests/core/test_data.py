"""Which rows are read when: the same whatever the ranks, each once an epoch, and the same again after a resume."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.data import DistributedDataLoader, evaluation_batches, next_token_collator
from femto_core.errors import UserError
from femto_core.sampler import PAD, DistributedSampler
from femto_tools.testing import RandomTask, WorkerPool, make_trainer

# A loader's processes are forked, and newer Pythons warn about that wherever there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
Remainder = Literal["drop", "pad"]
OWN = ("input_ids", "targets", "position_ids")
"""The model's own tensors of a batch."""


def sampler(**changes: Any) -> DistributedSampler:
    base: dict[str, Any] = {
        "rows": 20,
        "global_batch": 8,
        "micro_batch": 1,
        "size": 1,
        "rank": 0,
        "seed": 0,
        "shuffle": True,
        "remainder": "drop",
    }
    return DistributedSampler(**{**base, **changes})


def dealt(step: int, dp: int, **changes: Any) -> list[int]:
    """All ranks' rows of `step`, rank after rank, micro-batch after micro-batch."""
    ranks = [sampler(size=dp, rank=rank, **changes).micro_batches(step) for rank in range(dp)]
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    return [row for micro_batches in ranks for micro_batch in micro_batches for row in micro_batch]


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_depends_on_neither_ranks_nor_micro_batches(shuffle: bool, remainder: Remainder) -> None:
    for step in range(9):  # three epochs and more
        options = {"shuffle": shuffle, "remainder": remainder}
        expected = sampler(**options).global_rows(step)
        for dp, micro_batch in [(1, 1), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]:
            assert dealt(step, dp, micro_batch=micro_batch, **options) == expected


def test_each_micro_batch_has_its_size_and_each_rank_its_number_of_them() -> None:
    for dp, micro_batch in [(1, 2), (2, 2), (4, 1)]:
        one = sampler(size=dp, micro_batch=micro_batch)
        assert one.accumulation == 8 // dp // micro_batch
        assert [len(m) for m in one.micro_batches(5)] == [micro_batch] * one.accumulation


@given(
    rows=st.integers(1, 40),
    per_rank=st.integers(1, 5),
    dp=st.integers(1, 4),
    remainder=st.sampled_from(["drop", "pad"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_every_row_comes_once_an_epoch(
    rows: int, per_rank: int, dp: int, remainder: Remainder, shuffle: bool, seed: int
) -> None:
    options: dict[str, Any] = {"rows": rows, "global_batch": per_rank * dp, "remainder": remainder, "shuffle": shuffle}
    if rows < dp or (remainder == "drop" and rows < per_rank * dp):
        with pytest.raises(UserError, match=f"{rows} rows"):
            sampler(size=dp, seed=seed, **options)
        return
    steps = sampler(seed=seed, **options).steps_per_epoch
    for epoch in range(3):
        seen = [
            row for step in range(epoch * steps, (epoch + 1) * steps) for row in dealt(step, dp, seed=seed, **options)
        ]
        assert len(seen) == steps * per_rank * dp
        counts = Counter(row for row in seen if row != PAD)
        assert set(counts) <= set(range(rows))
        assert set(counts.values()) == {1}
        left_out = rows - len(counts)
        assert left_out == (0 if remainder == "pad" else rows % (per_rank * dp))
        assert seen.count(PAD) == (-rows % (per_rank * dp) if remainder == "pad" else 0)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        one = sampler(rows=24, seed=seed)
        return [row for step in range(3) for row in one.global_rows(number * 3 + step)]

    orders = [epoch(number, 0) for number in range(4)] + [epoch(0, seed) for seed in (10, 20)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert orders[0] != list(range(24))
    assert epoch(2, 0) == epoch(2, 0)
    straight = sampler(rows=24, shuffle=False)
    assert straight.global_rows(1) == straight.global_rows(4) == list(range(8, 16))


def test_four_rows_on_two_ranks_for_two_epochs() -> None:
    ranks = [sampler(rows=4, global_batch=2, size=2, rank=rank) for rank in range(2)]
    steps = [[row for rank in ranks for row in rank.micro_batches(step)[0]] for step in range(4)]
    assert all(len(step) == 2 for step in steps)
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == [0, 1, 2, 3]


def test_three_micro_batches_with_accumulation_four_leave_nothing_for_the_next_epoch() -> None:
    padded = sampler(rows=3, global_batch=4, shuffle=False, remainder="pad")
    assert padded.micro_batches(0) == padded.micro_batches(1) == [[0], [1], [2], [PAD]]
    dropped = sampler(rows=7, global_batch=4, shuffle=False)
    assert dropped.micro_batches(0) == dropped.micro_batches(1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 9, "size": 2}, ("global_batch = 9", "2 data-parallel ranks")),
        ({"micro_batch": 3}, ("global_batch = 8", "micro_batch = 3")),
        ({"rows": 3, "size": 4, "remainder": "pad"}, ("3 rows", "4 data-parallel ranks", "fewer processes")),
        ({"rows": 7}, ("7 rows", "global batch of 8", "--data.remainder pad")),
        ({"rows": 0, "remainder": "pad"}, ("0 rows",)),
    ],
    ids=str,
)
def test_what_cannot_be_dealt_out_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        sampler(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_global_random_state_is_neither_read_nor_changed() -> None:
    before = torch.get_rng_state()
    first = sampler(seed=77).global_rows(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(999)
    assert sampler(rows=20, seed=77).global_rows(0) == first
    torch.set_rng_state(before)


# The loader.


@attrs.frozen
class Numbers:
    """Row i is i, i + 1, ..., and remembers nothing."""

    rows: int = 20
    length: int = 4
    vocab_size: int = 100
    tokenizer_path: Path = Path("none")
    fingerprint: str = "numbers"

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        return torch.arange(index, index + self.length + 1)


def loader(workers: int = 0, rows: int = 20, **changes: Any) -> DistributedDataLoader:
    return DistributedDataLoader(
        Numbers(rows), sampler(rows=rows, **changes), next_token_collator, workers=workers, pin_memory=False
    )


def firsts(batches: Sequence[Batch]) -> list[list[int]]:
    """First tokens, which are row numbers; PAD where a row has no target."""
    rows = []
    for batch in batches:
        valid = (batch.targets != IGNORE_INDEX).any(dim=1)
        rows.append([int(i) if v else PAD for i, v in zip(batch.input_ids[:, 0], valid, strict=True)])
    return rows


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_each_step_the_samplers_rows(workers: int) -> None:
    one = loader(workers, micro_batch=2, size=2, rank=1, remainder="pad")
    for step in range(7):  # past two ends of an epoch
        batches = one.next_step()
        assert firsts(batches) == one.sampler.micro_batches(step)
        assert {batch.input_ids.shape for batch in batches} == {(2, 4)}
    one.close()


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 2), (0, 0)])
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
def test_a_loader_resumed_goes_on_where_the_other_stopped(before: int, after: int, stop: int) -> None:
    straight = loader(0)
    expected = [firsts(straight.next_step()) for _ in range(7)]
    first = loader(before)
    seen = [firsts(first.next_step()) for _ in range(stop)]
    state = first.state_dict()
    first.close()
    second = loader(after)
    second.next_step()  # what it did before it was told does not count
    second.load_state_dict(state)
    seen += [firsts(second.next_step()) for _ in range(7 - stop)]
    second.close()
    assert seen == expected
    assert second.state_dict() == {"step": 7}


def test_a_loader_that_read_ahead_says_only_what_it_gave_out() -> None:
    one = loader(2)
    one.next_step()
    assert one.state_dict() == {"step": 1}
    one.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_touches_no_global_generator(workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)
    one = loader(workers)
    for _ in range(4):
        one.next_step()
    one.load_state_dict({"step": 1})
    one.next_step()
    one.close()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert str(np.random.get_state(legacy=True)) == str(before[2])


def test_a_row_that_cannot_be_read_is_an_error_and_not_left_out() -> None:
    broken = DistributedDataLoader(Numbers(rows=5), sampler(rows=20), next_token_collator, workers=0, pin_memory=False)
    with pytest.raises(IndexError):
        [broken.next_step() for _ in range(2)]
    broken.close()


def test_next_tokens_are_targets_and_each_row_is_one_document() -> None:
    batch = next_token_collator([torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2, 3, 4])])
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.targets.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2]] * 2
    assert batch.extra == {}
    assert batch.valid == 6
    assert {getattr(batch, name).dtype for name in OWN} == {torch.int64}


def test_a_batch_moves_and_counts() -> None:
    batch = next_token_collator([torch.arange(4)])
    masked = attrs.evolve(batch, targets=torch.full((1, 3), IGNORE_INDEX))
    assert masked.valid == 0
    moved = batch.to(torch.device("cpu"))
    assert all(torch.equal(getattr(moved, name), getattr(batch, name)) for name in OWN)
    assert {getattr(batch.to(torch.device("meta")), name).device.type for name in OWN} == {"meta"}


# Evaluation.


@given(rows=st.integers(0, 20), dp=st.integers(1, 4), micro_batch=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_evaluation_counts_each_row_once_on_any_number_of_ranks(rows: int, dp: int, micro_batch: int) -> None:
    ranks = [
        list(evaluation_batches(Numbers(), next_token_collator, rows=rows, micro_batch=micro_batch, size=dp, rank=rank))
        for rank in range(dp)
    ]
    assert len({len(batches) for batches in ranks}) == 1, "ranks that meet in collectives need as many batches each"
    assert all(batch.input_ids.shape == (micro_batch, 4) for batches in ranks for batch in batches)
    seen = [row for batches in ranks for batch in firsts(batches) for row in batch if row != PAD]
    assert sorted(seen) == list(range(rows))
    assert sum(batch.valid for batches in ranks for batch in batches) == rows * 4


def evaluations(micro_batch: int, rows: int) -> float:
    values = {"eval": {"rows": rows}, "data": {"micro_batch": micro_batch}}
    trainer = make_trainer(values, (), {"random_task": RandomTask(rows=8, masked=0.5)})
    loss = trainer.evaluate()
    trainer.close()
    return loss


@pytest.mark.parametrize("rows", [3, 5, 8])
def test_the_evaluation_loss_depends_on_neither_ranks_nor_batch_size(pool: WorkerPool, rows: int) -> None:
    [expected] = pool.run(1, evaluations, 8, rows)
    for dp, micro_batch in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (4, 2)]:
        assert pool.run(dp, evaluations, micro_batch, rows) == [pytest.approx(expected, rel=1e-12)] * dp
