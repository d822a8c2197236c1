"""Schedules: pure functions from (micro-batches, placement) to what each rank computes, in order.

gpipe is written down, and so is interleaved where the ranks divide the micro-batches. The others come from one list
scheduler, which plays the whole pipeline through, unit by unit of time: every rank does the first thing in its order of
preference that is ready. A schedule of one's own is registered with `@schedule("name")`. Whatever its origin, a
schedule is simulated before it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from femto_pp.actions import Backward, Compute, Forward, WeightBackward
from femto_pp.placement import Placement

Order = tuple[Compute, ...]


@attrs.frozen
class Schedule:
    """A schedule, and what it asks of the placement."""

    orders: Callable[[int, Placement], tuple[Order, ...]]
    """(micro-batches, placement) -> what each rank computes, in order."""
    splits_backward: bool = False
    least_chunks: int = 1
    most_chunks: int = 1


SCHEDULES: dict[str, Schedule] = {}


def schedule(
    name: str, *, splits_backward: bool = False, least_chunks: int = 1, most_chunks: int = 1
) -> Callable[[Callable[[int, Placement], tuple[Order, ...]]], Callable[[int, Placement], tuple[Order, ...]]]:
    """Register a schedule under `name`. Raises ValueError where it is taken."""

    def register(
        function: Callable[[int, Placement], tuple[Order, ...]],
    ) -> Callable[[int, Placement], tuple[Order, ...]]:
        if name in SCHEDULES:
            raise ValueError(f"there is a schedule {name!r} already")
        SCHEDULES[name] = Schedule(function, splits_backward, least_chunks, most_chunks)
        return function

    return register


@schedule("gpipe")
def gpipe(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """All forwards, then all backwards in reverse order (Huang et al. 2019, arXiv:1811.06965)."""
    forwards = [Forward(m) for m in range(micro_batches)]
    backwards = [Backward(m) for m in reversed(range(micro_batches))]
    return tuple((*forwards, *backwards) for _ in range(placement.size))


@schedule("1f1b")
def one_forward_one_backward(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """As many forwards ahead as ranks follow, then one forward, one backward (Narayanan et al. 2021, section 2.2)."""
    return list_schedule(micro_batches, placement, lambda rank: placement.size - rank)


@schedule("interleaved", least_chunks=2, most_chunks=64)
def interleaved(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """1F1B over several chunks a rank, for a smaller bubble and more sends (Narayanan et al. 2021, section 2.2).

    A number of micro-batches that the ranks do not divide would deadlock in the paper's order; such are played through.
    """
    size, chunks = placement.size, placement.chunks
    ahead = [(size - rank - 1) * 2 + (chunks - 1) * size for rank in range(size)]
    if micro_batches % size:
        return list_schedule(micro_batches, placement, lambda rank: ahead[rank] + 1)
    orders = []
    for rank in range(size):
        forwards = [Forward(m, c) for m, c in forward_order(micro_batches, placement)]
        backwards = [Backward(m, c) for m, c in backward_order(micro_batches, placement)]
        warm_up = min(ahead[rank], len(forwards))
        order: list[Compute] = list(forwards[:warm_up])
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            order += [forward, backward]
        orders.append((*order, *backwards[len(forwards) - warm_up :]))
    return tuple(orders)


@schedule("zb", splits_backward=True)
def zero_bubble(micro_batches: int, placement: Placement) -> tuple[Order, ...]:
    """ZB-H1: 1F1B's memory; weight gradients fill the bubble (Qi et al. 2023, arXiv:2401.10241, section 2.3)."""
    size = placement.size
    return list_schedule(micro_batches, placement, lambda rank: size - rank, held=size)


def list_schedule(
    micro_batches: int, placement: Placement, ahead: Callable[[int], int], *, held: int = 0
) -> tuple[Order, ...]:
    """Play the pipeline through: a rank does forward where it has room, else backward, else a weight gradient.

    `ahead(rank)` is how many forwards a rank may be ahead of its backwards. With `held` backward is split, and so many
    forwards may wait for their weight gradient. More of either are allowed only where nothing else could go on.
    """
    return _play(micro_batches, placement, tuple(ahead(rank) for rank in range(placement.size)), held)


@functools.lru_cache(maxsize=64)
def _play(micro_batches: int, placement: Placement, caps: tuple[int, ...], held: int) -> tuple[Order, ...]:
    ranks = [_Rank(micro_batches, placement, rank, caps[rank], held) for rank in range(placement.size)]
    over: dict[tuple[str, int, int], int] = {}
    """(F or B, micro-batch, stage) -> when it is over."""
    now = 0
    while any(rank.has_work for rank in ranks):
        idle = [rank for rank in ranks if rank.busy_until <= now]
        started = [rank.start(now, over, beyond_caps=False) for rank in idle]
        if not any(started) and all(rank.busy_until <= now for rank in ranks):
            for rank in idle:
                rank.start(now, over, beyond_caps=True)
        now += 1
    return tuple(tuple(rank.order) for rank in ranks)


class _Rank:
    """One rank, while the pipeline is played through."""

    def __init__(self, micro_batches: int, placement: Placement, rank: int, cap: int, held: int) -> None:
        self._placement, self._rank, self._cap, self._held_cap = placement, rank, cap, held
        self._forwards = forward_order(micro_batches, placement)
        self._backwards = backward_order(micro_batches, placement)
        self._weights: list[tuple[int, int]] = []
        self._ahead = self._held = 0
        self.busy_until = 0
        self.order: list[Compute] = []

    @property
    def has_work(self) -> bool:
        return bool(self._forwards or self._backwards or self._weights)

    def start(self, now: int, over: dict[tuple[str, int, int], int], *, beyond_caps: bool) -> bool:
        """Start the first thing that is ready, if any."""
        action = self._choose(now, over, beyond_caps)
        if action is None:
            return False
        self.order.append(action)
        splits = bool(self._held_cap)
        self.busy_until = now + (2 if isinstance(action, Backward) and not splits else 1)
        place = (action.micro_batch, action.chunk)
        over[action.symbol, action.micro_batch, self._placement.stage(self._rank, action.chunk)] = self.busy_until
        if isinstance(action, Forward):
            self._forwards.remove(place)
            self._ahead += 1
            self._held += 1
        elif isinstance(action, Backward):
            self._backwards.remove(place)
            self._ahead -= 1
            if splits:
                self._weights.append(place)
        else:
            self._weights.remove(place)
            self._held -= 1
        return True

    def _choose(self, now: int, over: dict[tuple[str, int, int], int], beyond_caps: bool) -> Compute | None:
        def is_over(kind: str, micro_batch: int, stage: int) -> bool:
            return over.get((kind, micro_batch, stage), now + 1) <= now

        last = self._placement.stages - 1
        has_room = self._ahead < self._cap and (not self._held_cap or self._held < self._held_cap)
        if self._forwards and (has_room or beyond_caps):
            m, c = self._forwards[0]
            stage = self._placement.stage(self._rank, c)
            if stage == 0 or is_over("F", m, stage - 1):
                return Forward(m, c)
        for m, c in self._backwards:
            stage = self._placement.stage(self._rank, c)
            if is_over("F", m, stage) and (stage == last or is_over("B", m, stage + 1)):
                return Backward(m, c)
        return WeightBackward(*self._weights[0]) if self._weights and not beyond_caps else None


def forward_order(micro_batches: int, placement: Placement) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) in the order of forwards: chunk after chunk, for as many micro-batches as ranks."""
    size = placement.size
    groups = [range(start, min(start + size, micro_batches)) for start in range(0, micro_batches, size)]
    return [(m, c) for group in groups for c in range(placement.chunks) for m in group]


def backward_order(micro_batches: int, placement: Placement) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) in the order of backwards: likewise, last chunk first."""
    last = placement.chunks - 1
    return [(m, last - c) for m, c in forward_order(micro_batches, placement)]
