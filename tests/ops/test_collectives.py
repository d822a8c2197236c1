"""Collectives on flat vectors, for every size, dtype and timing: direct sends on gloo, and torch's own collectives."""

from __future__ import annotations

import math
import time
from typing import Any
from unittest import mock

import pytest
import torch

from femto_core.mesh import Axis, Mesh
from femto_ops import collectives
from femto_tools.testing import WorkerPool

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LENGTHS = (0, 1, 3, 1000)
"""Elements of each rank's part."""


def random_vector(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected_sum(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of ranks, in fp32 or wider, rounded once."""
    total = vectors[0].to(torch.promote_types(vectors[0].dtype, torch.float32))
    for vector in vectors[1:]:
        total = total + vector
    return total.to(vectors[0].dtype)


def every_collective(native: bool) -> bool:
    mesh = Mesh([], CPU)
    group, rank, size = mesh.group("dp"), mesh.rank, mesh.world_size
    for dtype in DTYPES:
        for length in LENGTHS:
            everyones = [random_vector(r + 10 * length, size * length, dtype) for r in range(size)]
            total = expected_sum(everyones)
            mine = slice(rank * length, (rank + 1) * length)
            with mock.patch.object(collectives, "_is_direct", return_value=not native):
                share = torch.full((length,), torch.nan, dtype=dtype)
                whole = everyones[rank].clone()
                collectives.reduce_scatter(whole, share, group).wait()
                check(share, total[mine], exact=not native)
                assert torch.equal(whole, everyones[rank]), "the buffer that is sent must not change"

                everything = torch.cat([vector[:length] for vector in everyones])
                gathered = torch.full((size * length,), torch.nan, dtype=dtype)
                gathered[mine] = everyones[rank][:length]
                collectives.all_gather(gathered, group).wait()
                assert torch.equal(gathered, everything)

                summed = everyones[rank].clone()
                pending = collectives.all_reduce(summed, group)
                collectives.advance([pending])
                pending.wait()
                check(summed, total, exact=not native)
    return True


def check(found: torch.Tensor, wanted: torch.Tensor, *, exact: bool) -> None:
    assert found.dtype == wanted.dtype
    if exact:
        assert torch.equal(found, wanted)
    else:
        bound = 8 * torch.finfo(wanted.dtype).eps
        torch.testing.assert_close(found, wanted, rtol=bound, atol=4 * bound)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_are_in_the_order_of_ranks_and_rounded_once(pool: WorkerPool, size: int) -> None:
    """Compare every value with the plain sum, because gloo was once reported to average instead."""
    assert pool.run(size, every_collective, False) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_torchs_own_collectives_agree_to_rounding(pool: WorkerPool, size: int) -> None:
    """Run on gloo the code path that NCCL takes."""
    assert pool.run(size, every_collective, True) == [True] * size


def share_inside_whole() -> bool:
    mesh = Mesh([], CPU)
    rank, size = mesh.rank, mesh.world_size
    whole = torch.arange(5.0 * size) + 100 * rank
    before = whole.clone()
    mine = whole[5 * rank : 5 * (rank + 1)]
    collectives.reduce_scatter(whole, mine, mesh.group("dp")).wait()
    wanted = size * (torch.arange(5.0) + 5 * rank) + 100 * sum(range(size))
    assert torch.equal(mine, wanted)
    others = torch.ones(5 * size, dtype=torch.bool)
    others[5 * rank : 5 * (rank + 1)] = False
    return torch.equal(whole[others], before[others])


def test_a_share_may_be_part_of_the_whole(pool: WorkerPool) -> None:
    for size in (1, 2, 4):
        assert pool.run(size, share_inside_whole) == [True] * size


def many_in_flight() -> bool:
    """Each rank is late at a different moment; sums and gathers overtake each other."""
    mesh = Mesh([], CPU)
    group, rank, size = mesh.group("dp"), mesh.rank, mesh.world_size
    in_flight: list[Any] = []
    for number in range(20):
        whole = torch.full((4 * size,), float(10**rank) * (number + 1), dtype=torch.float64)
        gathered = torch.zeros(2 * size, dtype=torch.float64)
        gathered[2 * rank : 2 * rank + 2] = rank + 10 * number
        pending = collectives.all_reduce(whole, group), collectives.all_gather(gathered, group)
        in_flight.append((number, whole, gathered, pending))
        if number % size == rank:
            time.sleep(0.02)
        if number % 3 == 2:
            collectives.advance([reduce for _, _, _, (reduce, _) in in_flight])
    for number, whole, gathered, (reduce, gather) in in_flight:
        gather.wait()
        reduce.wait()
        assert torch.equal(whole, torch.full_like(whole, (number + 1) * float("1" * size)))
        assert torch.equal(gathered, torch.arange(size, dtype=torch.float64).repeat_interleave(2) + 10 * number)
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_collectives_in_flight_with_late_ranks_do_not_mix(pool: WorkerPool, size: int) -> None:
    assert pool.run(size, many_in_flight, timeout_s=60) == [True] * size


def overtaking() -> bool:
    """Each rank starts the second halves at moments of its own, between the first halves of other all-reduces."""
    mesh = Mesh([], CPU)
    in_flight: list[Any] = []
    with mock.patch.object(collectives, "ONE_ROUND_BYTES", 0):
        for number in range(20):
            whole = torch.full((4 * mesh.world_size,), float(10**mesh.rank) * (number + 1), dtype=torch.float64)
            in_flight.append((whole, collectives.all_reduce(whole, mesh.group("dp"))))
            if (number + mesh.rank) % 3 == 0:
                collectives.advance([pending for _, pending in in_flight])
        for number, (whole, pending) in enumerate(in_flight):
            pending.wait()
            assert torch.equal(whole, torch.full_like(whole, (number + 1) * float("1" * mesh.world_size)))
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_second_halves_may_come_between_other_first_halves_on_every_rank(pool: WorkerPool, size: int) -> None:
    assert pool.run(size, overtaking, timeout_s=60) == [True] * size


def along_an_axis() -> tuple[list[float], list[float]]:
    mesh = Mesh([Axis("tp", 2, 100, "nothing")], CPU)
    along_dp, along_tp = (torch.full((2,), 10.0**mesh.rank) for _ in range(2))
    pending = collectives.all_reduce(along_dp, mesh.group("dp")), collectives.all_reduce(along_tp, mesh.group("tp"))
    for collective in pending:
        collective.wait()
    return along_dp.tolist(), along_tp.tolist()


def test_ranks_are_counted_inside_their_group(pool: WorkerPool) -> None:
    """Ranks 0 and 2 are neighbours along dp: ranks in the group differ from ranks in the world."""
    dp, tp = {0: 101.0, 1: 1010.0}, {0: 11.0, 1: 1100.0}
    for rank, answer in enumerate(pool.run(4, along_an_axis)):
        assert answer == ([dp[rank % 2]] * 2, [tp[rank // 2]] * 2)


def same_bits() -> list[torch.Tensor]:
    mesh = Mesh([], CPU)
    answers = []
    for number in range(8):
        whole = random_vector(mesh.rank + 100 * number, 64 * mesh.world_size, torch.float32)
        if (number + mesh.rank) % 3 == 0:
            time.sleep(0.005)
        collectives.all_reduce(whole, mesh.group("dp")).wait()
        answers.append(whole)
    return answers


def test_every_rank_gets_the_same_bits_every_time(pool: WorkerPool) -> None:
    first, *others = [*pool.run(4, same_bits), *pool.run(4, same_bits)]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def small_addends() -> float:
    mesh = Mesh([], CPU)
    value = 256.0 if mesh.rank == 0 else 0.75  # in bf16, 256 + 0.75 is 256: a sum in bf16 would lose all three addends
    whole = torch.full((4 * mesh.world_size,), value, dtype=torch.bfloat16)
    collectives.all_reduce(whole, mesh.group("dp")).wait()
    return float(whole[0])


def test_a_sum_in_bf16_over_four_ranks_is_taken_in_fp32(pool: WorkerPool) -> None:
    assert pool.run(4, small_addends) == [258.0] * 4


def any_length() -> bool:
    mesh = Mesh([], CPU)
    for dtype in DTYPES:
        for shape in ((0,), (1,), (), (3,), (5, 7), (1001,)):
            everyones = [random_vector(r, math.prod(shape), dtype).view(shape) for r in range(mesh.world_size)]
            whole = everyones[mesh.rank].clone()
            pending = collectives.all_reduce(whole, mesh.group("dp"))
            collectives.advance([pending])
            pending.wait()
            check(whole, expected_sum(everyones), exact=True)
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_all_reduce_takes_any_length_whether_it_divides_or_not(pool: WorkerPool, size: int) -> None:
    assert pool.run(size, any_length) == [True] * size


def large_and_small() -> bool:
    """Two ranks take one round for small buckets and two rounds for large ones; both give the same result."""
    mesh = Mesh([], CPU)
    for limit in (0, 2**23):
        with mock.patch.object(collectives, "ONE_ROUND_BYTES", limit):
            for dtype in DTYPES:
                everyones = [random_vector(r, 999, dtype) for r in range(2)]
                whole = everyones[mesh.rank].clone()
                collectives.all_reduce(whole, mesh.group("dp")).wait()
                check(whole, expected_sum(everyones), exact=True)
    return True


def test_two_ranks_get_the_same_bits_in_one_round_or_two(pool: WorkerPool) -> None:
    assert pool.run(2, large_and_small) == [True] * 2


class Slow:
    """Wraps gloo's work and counts the waits."""

    waited = 0

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        type(self).waited += 1
        self.work.wait()


def waits_before_wait() -> tuple[int, int]:
    mesh = Mesh([], CPU)
    real, Slow.waited = collectives._exchange, 0
    with mock.patch.object(collectives, "_exchange", lambda *a: [Slow(work) for work in real(*a)]):
        pending = collectives.reduce_scatter(torch.ones(4 * mesh.world_size), torch.ones(4), mesh.group("dp"))
        started = Slow.waited
        pending.wait()
    return started, Slow.waited


def test_starting_does_not_wait_and_waiting_covers_every_send_and_receive(pool: WorkerPool) -> None:
    assert pool.run(4, waits_before_wait) == [(0, 6)] * 4
