"""The simulator: checks that a schedule is complete, ends, and matches its messages, and computes its timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from femto_pp.actions import Backward, Compute, Forward, Recv, Send, WeightBackward
from femto_pp.lowering import Channel, Located, channel_of, consumer, lower, producer
from femto_pp.placement import Placement
from femto_pp.schedules import SCHEDULES, Order

COSTS: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 1.0, "W": 1.0})
"""Time of each part. A backward that is not split takes the time of B and W together."""


class BrokenScheduleError(ValueError):
    """A schedule that would hang, leave a computation out, or receive the wrong message."""


@attrs.frozen
class Played:
    """A computation, with the time at which it ran."""

    rank: int
    compute: Compute
    start: float
    end: float


@attrs.frozen
class Simulation:
    """The timeline of a schedule, and the costs that follow from it."""

    timeline: tuple[Played, ...]
    """Ordered by start, then by rank."""
    size: int
    """The number of ranks."""

    @property
    def length(self) -> float:
        """The time at which the last rank ends."""
        return max(played.end for played in self.timeline)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they are idle."""
        return 1 - sum(p.end - p.start for p in self.timeline) / (self.length * self.size)

    def in_flight(self, rank: int) -> int:
        """Return the most chunk forwards of a rank that are in flight at a time.

        A forward is in flight until its backward ends, or its weight gradient if backward is split.
        """
        splits = any(isinstance(p.compute, WeightBackward) for p in self.timeline)
        most = now = 0
        for played in self.timeline:
            if played.rank == rank:
                now += isinstance(played.compute, Forward)
                most = max(most, now)
                now -= isinstance(played.compute, WeightBackward if splits else Backward)
        return most


def simulate(
    orders: Sequence[Order],
    placement: Placement,
    micro_batches: int,
    costs: Mapping[str, float] = COSTS,
    *,
    splits: bool | None = None,
) -> Simulation:
    """Run the orders of all ranks against each other; sends take no time and never block.

    `splits`: whether backward has two halves; None: it has if there is any `WeightBackward`.

    Raises `BrokenScheduleError` if a computation is missing or done twice, if ranks wait for each other forever, or if
    a channel's messages are not received exactly as they are sent.
    """
    if splits is None:
        splits = any(isinstance(compute, WeightBackward) for order in orders for compute in order)
    check_complete(orders, placement, micro_batches, splits)
    check_messages(orders, placement)
    duration = {Forward: costs["F"], Backward: costs["B"] + (0 if splits else costs["W"]), WeightBackward: costs["W"]}
    waiting = [deque(order) for order in orders]
    clock = [0.0] * placement.size
    ended: dict[Located, float] = {}
    timeline: list[Played] = []
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(waiting):
            while queue:
                needs = needed(queue[0], placement, rank)
                if any(need not in ended for need in needs):
                    break
                compute = queue.popleft()
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = start + duration[type(compute)]
                ended[rank, compute] = clock[rank]
                timeline.append(Played(rank, compute, start, clock[rank]))
                progress = True
    if any(waiting):
        stuck = ", ".join(f"rank {rank} at {queue[0]}" for rank, queue in enumerate(waiting) if queue)
        raise BrokenScheduleError(f"ranks wait for each other forever: {stuck}")
    return Simulation(tuple(sorted(timeline, key=lambda p: (p.start, p.rank))), placement.size)


def needed(compute: Compute, placement: Placement, rank: int) -> list[Located]:
    """Return all computations, with their ranks, that must end before `rank` can start `compute`."""
    place = (compute.micro_batch, compute.chunk)
    if isinstance(compute, WeightBackward):
        return [(rank, Backward(*place))]
    own: list[Located] = [(rank, Forward(*place))] if isinstance(compute, Backward) else []
    before = producer(compute, placement, rank)
    return own if before is None else [*own, before]


def check_complete(orders: Sequence[Order], placement: Placement, micro_batches: int, splits: bool) -> None:
    """Refuse orders in which a rank leaves out a computation, does it twice, or does one that does not exist."""
    kinds: tuple[type[Compute], ...] = (Forward, Backward, WeightBackward) if splits else (Forward, Backward)
    wanted = {kind(m, c) for kind in kinds for m in range(micro_batches) for c in range(placement.chunks)}
    for rank, order in enumerate(orders):
        if len(set(order)) != len(order):
            twice = next(compute for compute in order if order.count(compute) > 1)
            raise BrokenScheduleError(f"rank {rank} does {twice} twice")
        if set(order) != wanted:
            odd = min(set(order) ^ wanted, key=str)
            raise BrokenScheduleError(f"rank {rank} {'leaves out' if odd in wanted else 'invents'} {odd}")


def check_messages(orders: Sequence[Order], placement: Placement) -> None:
    """Refuse orders whose sends and receives differ in number or order on any channel."""
    sent: dict[Channel, list[Located | None]] = {}
    received: dict[Channel, list[Located | None]] = {}
    for rank in range(placement.size):
        for action in lower(orders, placement, rank):
            if isinstance(action, Send):
                receiver = consumer(action.compute, placement, rank)
                sent.setdefault(channel_of(action, placement, rank), []).append(receiver)
            elif isinstance(action, Recv):
                received.setdefault(channel_of(action, placement, rank), []).append((rank, action.compute))
    for channel in {*sent, *received}:
        if sent.get(channel) != received.get(channel):
            raise BrokenScheduleError(f"messages from rank {channel[0]} to rank {channel[1]} are not received as sent")


def play(name: str, micro_batches: int, placement: Placement) -> Simulation:
    """Simulate a registered schedule."""
    found = SCHEDULES[name]
    return simulate(found.orders(micro_batches, placement), placement, micro_batches, splits=found.splits_backward)
