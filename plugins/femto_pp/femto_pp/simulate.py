"""Plays a schedule through on paper: does it end, does every message find its receiver, and what does it cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from femto_pp.actions import Backward, Compute, Forward, WeightBackward, receive_of, send_of
from femto_pp.lowering import Channel, channel_of, lower, source_of
from femto_pp.placement import Placement
from femto_pp.schedules import SCHEDULES, Order

COSTS: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 1.0, "W": 1.0})
"""Time of each part; a backward that is not split takes B and W together."""


class BrokenScheduleError(ValueError):
    """A schedule that would hang, or leave something out."""


@attrs.frozen
class Played:
    """One action, when it ran."""

    rank: int
    action: Compute
    start: float
    end: float


@attrs.frozen
class Simulation:
    """How a schedule went."""

    timeline: tuple[Played, ...]
    size: int

    @property
    def length(self) -> float:
        """When the last rank was done."""
        return max(played.end for played in self.timeline)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they waited."""
        return 1 - sum(p.end - p.start for p in self.timeline) / (self.length * self.size)

    def in_flight(self, rank: int) -> int:
        """Return the most chunk forwards of a rank that waited for their backward (and weight gradient) at a time."""
        splits = any(isinstance(p.action, WeightBackward) for p in self.timeline)
        most = now = 0
        for played in self.timeline:
            if played.rank == rank:
                now += isinstance(played.action, Forward)
                most = max(most, now)
                now -= isinstance(played.action, WeightBackward if splits else Backward)
        return most


def simulate(
    orders: Sequence[Order],
    placement: Placement,
    micro_batches: int,
    costs: Mapping[str, float] = COSTS,
    *,
    splits: bool | None = None,
) -> Simulation:
    """Run all ranks' orders against each other, sends being free and never blocking.

    `splits`: whether backward has two halves; None: it does where there is any `WeightBackward`.

    Raises `BrokenScheduleError` where an action is missing or done twice, where ranks wait for each other for ever,
    where a message is never received, or received in another order than it was sent.
    """
    if splits is None:
        splits = any(isinstance(action, WeightBackward) for order in orders for action in order)
    check_complete(orders, placement, micro_batches, splits)
    check_messages(orders, placement)
    duration = {Forward: costs["F"], Backward: costs["B"] + (0 if splits else costs["W"]), WeightBackward: costs["W"]}
    waiting = [deque(order) for order in orders]
    clock = [0.0] * placement.size
    ended: dict[tuple[int, Compute], float] = {}
    timeline: list[Played] = []
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(waiting):
            while queue:
                needs = needed(queue[0], placement, rank)
                if any(need not in ended for need in needs):
                    break
                action = queue.popleft()
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = start + duration[type(action)]
                ended[rank, action] = clock[rank]
                timeline.append(Played(rank, action, start, clock[rank]))
                progress = True
    if any(waiting):
        stuck = ", ".join(f"rank {rank} at {queue[0]}" for rank, queue in enumerate(waiting) if queue)
        raise BrokenScheduleError(f"ranks wait for each other for ever: {stuck}")
    return Simulation(tuple(sorted(timeline, key=lambda p: (p.start, p.rank))), placement.size)


def needed(action: Compute, placement: Placement, rank: int) -> list[tuple[int, Compute]]:
    """Return (rank, action) of all that must be over before an action can start."""
    m, stage = action.micro_batch, placement.stage(rank, action.chunk)

    def at(kind: type[Compute], other: int) -> tuple[int, Compute]:
        return placement.rank(other), kind(m, placement.chunk(other))

    if isinstance(action, Forward):
        return [at(Forward, stage - 1)] if stage else []
    if isinstance(action, WeightBackward):
        return [at(Backward, stage)]
    return [at(Forward, stage), *([at(Backward, stage + 1)] if stage + 1 < placement.stages else [])]


def check_complete(orders: Sequence[Order], placement: Placement, micro_batches: int, splits: bool) -> None:
    """Refuse orders that leave out an action, or do one twice."""
    kinds: tuple[type[Compute], ...] = (Forward, Backward, WeightBackward) if splits else (Forward, Backward)
    wanted = {kind(m, c) for kind in kinds for m in range(micro_batches) for c in range(placement.chunks)}
    for rank, order in enumerate(orders):
        if len(set(order)) != len(order):
            twice = next(a for a in order if order.count(a) > 1)
            raise BrokenScheduleError(f"rank {rank} does {twice} twice")
        if set(order) != wanted:
            odd = min(set(order) ^ wanted, key=str)
            raise BrokenScheduleError(f"rank {rank} {'leaves out' if odd in wanted else 'invents'} {odd}")


def check_messages(orders: Sequence[Order], placement: Placement) -> None:
    """Refuse steps whose sends and receives do not match, channel by channel, in number and order."""
    sent: dict[Channel, list[tuple[int, int]]] = {}
    received: dict[Channel, list[tuple[int, int]]] = {}
    for rank in range(placement.size):
        for step in lower(orders, placement, rank):
            outgoing, incoming = send_of(step), receive_of(step)
            if outgoing is not None:
                kind = Forward if outgoing.symbol == "SF" else Backward
                channel = channel_of(kind(outgoing.micro_batch, outgoing.chunk), placement, rank)
                assert channel is not None
                stage = placement.stage(rank, outgoing.chunk) + (1 if channel[2] == "F" else -1)
                sent.setdefault(channel, []).append((outgoing.micro_batch, stage))
            if incoming is not None:
                kind = Forward if incoming.symbol == "RF" else Backward
                source = source_of(kind(incoming.micro_batch, incoming.chunk), placement, rank)
                assert source is not None
                stage = placement.stage(rank, incoming.chunk)
                received.setdefault(source[0], []).append((incoming.micro_batch, stage))
    for channel in {*sent, *received}:
        if sent.get(channel, []) != received.get(channel, []):
            raise BrokenScheduleError(f"messages from rank {channel[0]} to rank {channel[1]} are not received as sent")


def play(name: str, micro_batches: int, placement: Placement) -> Simulation:
    """Simulate a registered schedule."""
    found = SCHEDULES[name]
    return simulate(found.orders(micro_batches, placement), placement, micro_batches, splits=found.splits_backward)
