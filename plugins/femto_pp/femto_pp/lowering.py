"""From what each rank computes to what it does: sends and receives are put where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from femto_pp.actions import (
    Action,
    Backward,
    Compute,
    Forward,
    RecvBackward,
    RecvForward,
    SendBackward,
    SendBackwardRecvForward,
    SendForward,
    SendForwardRecvBackward,
    Step,
)
from femto_pp.placement import Placement
from femto_pp.schedules import Order

Channel = tuple[int, int, str]
"""From a rank, to a rank, forward (F) or backward (B): what goes through one keeps its order."""


def channel_of(action: Compute, placement: Placement, rank: int) -> Channel | None:
    """Return the channel through which an action's result leaves the rank; None where it does not."""
    stage = placement.stage(rank, action.chunk)
    following = {"F": stage + 1, "B": stage - 1}.get(action.symbol, -1)
    if not 0 <= following < placement.stages or placement.rank(following) == rank:
        return None
    return rank, placement.rank(following), action.symbol


def source_of(action: Compute, placement: Placement, rank: int) -> tuple[Channel, Action] | None:
    """Return the channel through which an action's input comes, and the action that sends it; None for no channel."""
    stage = placement.stage(rank, action.chunk)
    if isinstance(action, Forward):
        before, kind = stage - 1, "F"
    elif isinstance(action, Backward):
        before, kind = stage + 1, "B"
    else:
        return None
    if not 0 <= before < placement.stages or placement.rank(before) == rank:
        return None
    sender = placement.rank(before)
    return (sender, rank, kind), type(action)(action.micro_batch, placement.chunk(before))


def channels(placement: Placement) -> list[Channel]:
    """Return every channel that a pipeline needs, in an order that all ranks agree on."""
    found = []
    for stage in range(placement.stages - 1):
        here, there = placement.rank(stage), placement.rank(stage + 1)
        if here != there:
            found += [(here, there, "F"), (there, here, "B")]
    return list(dict.fromkeys(found))


def lower(orders: Sequence[Order], placement: Placement, rank: int) -> list[Step]:
    """Return all that `rank` does, in order.

    A rank receives in the order in which the other sends, which it knows, since schedules are pure functions; a result
    that is sent before it is needed is received before it is needed.
    """
    sent: dict[Channel, Iterator[Compute]] = {}
    received: set[tuple[Channel, Action]] = set()
    steps: list[Step] = []
    for action in orders[rank]:
        source = source_of(action, placement, rank)
        if source is not None:
            channel, wanted = source
            if channel not in sent:
                sender = orders[channel[0]]
                sent[channel] = iter([a for a in sender if channel_of(a, placement, channel[0]) == channel])
            while (channel, wanted) not in received:
                message = next(sent[channel])  # runs dry only where the sender never sends it: a broken schedule
                received.add((channel, message))
                stage = placement.stage(channel[0], message.chunk) + (1 if channel[2] == "F" else -1)
                kind = RecvForward if channel[2] == "F" else RecvBackward
                steps.append(kind(message.micro_batch, placement.chunk(stage)))
        steps.append(action)
        if channel_of(action, placement, rank) is not None:
            kind_sent = SendForward if isinstance(action, Forward) else SendBackward
            steps.append(kind_sent(action.micro_batch, action.chunk))
    return list(fuse(steps))


def fuse(steps: Sequence[Step]) -> Iterator[Step]:
    """Join a send with the receive that follows it, where they go opposite ways."""
    at = 0
    while at < len(steps):
        this, following = steps[at], steps[at + 1] if at + 1 < len(steps) else None
        if isinstance(this, SendForward) and isinstance(following, RecvBackward):
            yield SendForwardRecvBackward(this, following)
            at += 2
        elif isinstance(this, SendBackward) and isinstance(following, RecvForward):
            yield SendBackwardRecvForward(this, following)
            at += 2
        else:
            yield this
            at += 1
