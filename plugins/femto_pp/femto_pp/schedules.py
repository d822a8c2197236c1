"""Schedules: pure functions from (micro-batches, placement) to the computations of each rank, in order.

`gpipe` is written out, and so is `interleaved` if the number of ranks divides the number of micro-batches. All others
come from a list scheduler. It plays the whole pipeline, one unit of time after another: each rank starts the first
ready computation in its order of preference. A plugin registers its own schedule with `@schedule("name")`. Every
schedule is simulated before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from femto_pp.actions import Backward, Compute, Forward, WeightBackward
from femto_pp.placement import Placement, round_robin

Order = tuple[Compute, ...]
"""The computations of one rank, in order."""
Orders = Callable[[int, Placement], tuple[Order, ...]]
"""(micro-batches, placement) -> the order of each rank."""
Place = tuple[int, int]
"""(micro-batch, chunk)."""


@attrs.frozen
class RegisteredSchedule:
    """A schedule, and the placements that it can be used with."""

    orders: Orders
    splits_backward: bool = False
    """Whether each `Backward` is followed by a `WeightBackward`."""
    least_chunks: int = 1
    most_chunks: int = 1
    placement: Callable[[int, int], Placement] = round_robin
    """(ranks, chunks of each rank) -> placement."""


SCHEDULES: dict[str, RegisteredSchedule] = {}


def schedule(
    name: str,
    *,
    splits_backward: bool = False,
    least_chunks: int = 1,
    most_chunks: int = 1,
    placement: Callable[[int, int], Placement] = round_robin,
) -> Callable[[Orders], Orders]:
    """Register a schedule under `name`. Raises ValueError if the name is taken."""

    def register(function: Orders) -> Orders:
        if name in SCHEDULES:
            raise ValueError(f"schedule {name!r} is registered already")
        SCHEDULES[name] = RegisteredSchedule(function, splits_backward, least_chunks, most_chunks, placement)
        return function

    return register


@schedule("gpipe")
def gpipe(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """All forwards, then all backwards in reverse order; one chunk per rank (Huang et al. 2019, arXiv:1811.06965)."""
    forwards = [Forward(m) for m in range(micro_batches)]
    backwards = [Backward(m) for m in reversed(range(micro_batches))]
    return tuple((*forwards, *backwards) for _ in range(placement.size))


@schedule("1f1b")
def one_forward_one_backward(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): forwards and backwards alternate after a warm-up.

    Rank r has at most size - r micro-batches in flight.
    """
    return list_schedule(micro_batches, placement, lambda rank: placement.size - rank)


@schedule("interleaved", least_chunks=2, most_chunks=64)
def interleaved(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """1F1B over several chunks per rank: a smaller bubble for more messages (Narayanan et al. 2021, section 2.2).

    If the number of ranks does not divide the number of micro-batches, the paper's order would deadlock. The list
    scheduler then finds another one.
    """
    size, chunks = placement.size, placement.chunks
    ahead = [(size - rank - 1) * 2 + (chunks - 1) * size for rank in range(size)]
    if micro_batches % size:
        return list_schedule(micro_batches, placement, lambda rank: ahead[rank] + 1)
    orders = []
    for rank in range(size):
        forwards = [Forward(m, c) for m, c in chunk_forwards(micro_batches, placement)]
        backwards = [Backward(m, c) for m, c in chunk_backwards(micro_batches, placement)]
        warm_up = min(ahead[rank], len(forwards))
        order: list[Compute] = list(forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += [forward, backward]
        orders.append((*order, *backwards[len(forwards) - warm_up :]))
    return tuple(orders)


@schedule("zb", splits_backward=True)
def zero_bubble(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241, section 2.3): weight gradients fill the bubble, in 1F1B's memory."""
    size = placement.size
    return list_schedule(micro_batches, placement, lambda rank: size - rank, held=size)


def list_schedule(
    micro_batches: int, placement: Placement, ahead: Callable[[int], int], *, held: int = 0
) -> tuple[Order, ...]:
    """Play the pipeline: a rank prefers a forward within its limits, then a backward, then a weight gradient.

    `ahead(rank)` limits how many chunk forwards of a rank wait for their backward. A positive `held` splits backward,
    and limits how many wait for their weight gradient. A limit is exceeded only if no rank could go on otherwise. Works
    for any placement.
    """
    return _play(micro_batches, placement, tuple(ahead(rank) for rank in range(placement.size)), held)


@functools.lru_cache(maxsize=64)
def _play(micro_batches: int, placement: Placement, limits: tuple[int, ...], held: int) -> tuple[Order, ...]:
    ranks = [_Rank(micro_batches, placement, rank, limits[rank], held) for rank in range(placement.size)]
    ends: dict[tuple[str, int, int], int] = {}
    """(F or B, micro-batch, virtual stage) -> when it ends."""
    now = 0
    while any(rank.has_work for rank in ranks):
        idle = [rank for rank in ranks if rank.busy_until <= now]
        started = [rank.start(now, ends, beyond_limits=False) for rank in idle]
        if not any(started) and all(rank.busy_until <= now for rank in ranks):
            for rank in idle:
                rank.start(now, ends, beyond_limits=True)
        now += 1
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """One rank while the pipeline is played."""

    def __init__(self, micro_batches: int, placement: Placement, rank: int, limit: int, held: int) -> None:
        self._placement, self._rank, self._limit, self._held_limit = placement, rank, limit, held
        self._forwards = chunk_forwards(micro_batches, placement)
        self._backwards = chunk_backwards(micro_batches, placement)
        self._weights: list[Place] = []
        self._ahead = self._held = 0
        self.busy_until = 0
        self.order: list[Compute] = []

    @property
    def has_work(self) -> bool:
        return bool(self._forwards or self._backwards or self._weights)

    def start(self, now: int, ends: dict[tuple[str, int, int], int], *, beyond_limits: bool) -> bool:
        """Start the first computation that is ready, and tell whether there is one."""
        compute = self._choose(now, ends, beyond_limits)
        if compute is None:
            return False
        self.order.append(compute)
        splits = bool(self._held_limit)
        self.busy_until = now + (2 if isinstance(compute, Backward) and not splits else 1)
        virtual_stage = self._placement.virtual_stage(self._rank, compute.chunk)
        ends[compute.symbol, compute.micro_batch, virtual_stage] = self.busy_until
        place = (compute.micro_batch, compute.chunk)
        if isinstance(compute, Forward):
            self._forwards.remove(place)
            self._ahead += 1
            self._held += 1
        elif isinstance(compute, Backward):
            self._backwards.remove(place)
            self._ahead -= 1
            if splits:
                self._weights.append(place)
        else:
            self._weights.remove(place)
            self._held -= 1
        return True

    def _choose(self, now: int, ends: dict[tuple[str, int, int], int], beyond_limits: bool) -> Compute | None:
        def has_ended(symbol: str, micro_batch: int, virtual_stage: int) -> bool:
            return ends.get((symbol, micro_batch, virtual_stage), now + 1) <= now

        last = self._placement.virtual_stages - 1
        has_room = self._ahead < self._limit and (not self._held_limit or self._held < self._held_limit)
        if self._forwards and (has_room or beyond_limits):
            m, c = self._forwards[0]
            here = self._placement.virtual_stage(self._rank, c)
            if here == 0 or has_ended("F", m, here - 1):
                return Forward(m, c)
        for m, c in self._backwards:
            here = self._placement.virtual_stage(self._rank, c)
            if has_ended("F", m, here) and (here == last or has_ended("B", m, here + 1)):
                return Backward(m, c)
        return WeightBackward(*self._weights[0]) if self._weights and not beyond_limits else None


def chunk_forwards(micro_batches: int, placement: Placement) -> list[Place]:
    """Return the forwards of a rank in order: groups of as many micro-batches as ranks, first chunk first in each."""
    size = placement.size
    groups = [range(start, min(start + size, micro_batches)) for start in range(0, micro_batches, size)]
    return [(m, c) for group in groups for c in range(placement.chunks) for m in group]


def chunk_backwards(micro_batches: int, placement: Placement) -> list[Place]:
    """Return the backwards of a rank in order: the same groups, last chunk first in each."""
    last = placement.chunks - 1
    return [(m, last - c) for m, c in chunk_forwards(micro_batches, placement)]
