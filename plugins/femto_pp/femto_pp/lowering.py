"""Lowering: a rank's computations become its actions, with sends and receives put in.

The data flow follows the placement's table: forward from each virtual stage to the next, backward the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from femto_pp.actions import Action, Backward, Compute, Forward, Recv, Send
from femto_pp.placement import Placement
from femto_pp.schedules import Order

Channel = tuple[int, int, str]
"""(sender, receiver, F or B). Messages of one channel arrive in the order in which they were sent."""
Located = tuple[int, Compute]
"""(rank, one of its computations)."""
DIRECTION = {"F": 1, "B": -1}
"""The step from one virtual stage to the next in the order of computation."""


def producer(compute: Compute, placement: Placement, rank: int) -> Located | None:
    """Return the computation in the neighbouring chunk that gives the input; None if there is no such chunk.

    `compute` belongs to `rank`. The embedding's forward has no producer, and neither have the head's backward and
    weight gradients.
    """
    return _neighbour(compute, placement, rank, -1)


def consumer(compute: Compute, placement: Placement, rank: int) -> Located | None:
    """Return the computation in the neighbouring chunk that takes the result; None if there is no such chunk."""
    return _neighbour(compute, placement, rank, 1)


def _neighbour(compute: Compute, placement: Placement, rank: int, sign: int) -> Located | None:
    if not isinstance(compute, Forward | Backward):
        return None
    found = placement.virtual_stage(rank, compute.chunk) + sign * DIRECTION[compute.symbol]
    if not 0 <= found < placement.virtual_stages:
        return None
    return placement.rank(found), type(compute)(compute.micro_batch, placement.chunk(found))


def channel_to(compute: Compute, placement: Placement, rank: int) -> Channel | None:
    """Return the channel that brings the input of `rank`'s computation; None if it comes from no other rank."""
    found = producer(compute, placement, rank)
    return None if found is None or found[0] == rank else (found[0], rank, compute.symbol)


def channel_from(compute: Compute, placement: Placement, rank: int) -> Channel | None:
    """Return the channel that takes the result of `rank`'s computation; None if no other rank needs it."""
    found = consumer(compute, placement, rank)
    return None if found is None or found[0] == rank else (rank, found[0], compute.symbol)


def channel_of(action: Send | Recv, placement: Placement, rank: int) -> Channel:
    """Return the channel that a send or receive of `rank` uses."""
    find = channel_from if isinstance(action, Send) else channel_to
    found = find(action.compute, placement, rank)
    assert found is not None, f"rank {rank} has no channel for {action}"
    return found


def channels(placement: Placement) -> list[Channel]:
    """Return every channel of a pipeline, in the same order on all ranks."""
    found = []
    for virtual_stage in range(placement.virtual_stages - 1):
        here, there = placement.rank(virtual_stage), placement.rank(virtual_stage + 1)
        if here != there:
            found += [(here, there, "F"), (there, here, "B")]
    return list(dict.fromkeys(found))


def lower(orders: Sequence[Order], placement: Placement, rank: int) -> list[Action]:
    """Return all actions of `rank`, in order, for `orders` that are complete.

    A rank receives in the order in which the other rank sends. It knows this order, since schedules are pure functions.
    If a message is sent before the needed one, it is also received before it.
    """
    unreceived: dict[Channel, Iterator[Compute]] = {}
    received: set[Compute] = set()
    actions: list[Action] = []
    for compute in orders[rank]:
        channel = channel_to(compute, placement, rank)
        if channel is not None:
            if channel not in unreceived:
                unreceived[channel] = _needing(orders, placement, channel)
            while compute not in received:
                needing = next(unreceived[channel])
                received.add(needing)
                actions.append(Recv(needing))
        actions.append(compute)
        if channel_from(compute, placement, rank) is not None:
            actions.append(Send(compute))
    return actions


def _needing(orders: Sequence[Order], placement: Placement, channel: Channel) -> Iterator[Compute]:
    """Yield the receiver's computations that need a channel's messages, in the order in which these are sent."""
    sender = channel[0]
    for compute in orders[sender]:
        if channel_from(compute, placement, sender) == channel:
            found = consumer(compute, placement, sender)
            assert found is not None
            yield found[1]
