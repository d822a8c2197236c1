"""Collectives on flat buckets, started now and awaited later; each along one process group.

NCCL has its own. Gloo's reduce-scatter and all-gather take three to four times as long as the same bytes sent straight
from rank to rank (128 MiB over two processes of one machine: 180 and 127 ms, against 40 and 30), so on gloo every rank
sends each other its part directly, as many bytes as a ring would. Sums are then taken by the part's one owner, in
the order of the ranks, in fp32 or wider: the result does not depend on timing, and bf16 is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

ONE_ROUND_BYTES = 2**23
"""Two ranks simply swap sums that are smaller: as many bytes, one round, and every rank adds all of it."""
REDUCE_TAG, GATHER_TAG = 71, 72  # so that one kind may overtake the other on some ranks only
_c10d: Any = dist
# torch is renaming them; the old names warn.
_reduce_scatter = getattr(_c10d, "reduce_scatter_single", None) or _c10d.reduce_scatter_tensor
_all_gather = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor


class Pending(Protocol):
    """A collective under way. Its tensors may be neither read nor written before `wait` has returned."""

    def wait(self) -> None:
        """Return when the result is there (on CUDA: when what is enqueued from now on will see it)."""


def reduce_scatter(whole: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to put the sum over ranks of this rank's part of their `whole` [w * n] into `share` [n].

    `share` may be this rank's part of `whole` itself. All ranks start their collectives in one order.
    """
    if _is_direct(group):
        return _DirectReduce(whole, share, group)
    return _native(_reduce_scatter(share, whole, group=group, async_op=True), whole, share)


def all_gather(whole: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to fill `whole` [w * n] with every rank's own part of it."""
    if _is_direct(group):
        return _DirectGather(whole, group)
    return _native(_all_gather(whole, _parts(whole, group)[group.rank()], group=group, async_op=True), whole)


def all_reduce(whole: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to sum a contiguous `whole` over ranks, in place."""
    if _is_direct(group):
        small = group.size() == 2 and whole.nbytes <= ONE_ROUND_BYTES
        return _DirectExchange(whole.view(-1), group) if small else _DirectAllReduce(whole.view(-1), group)
    return _native(dist.all_reduce(whole, group=group, async_op=True), whole)


def advance(under_way: Sequence[Pending]) -> None:
    """Let those that go in two halves begin their second, waiting for the first; in their order, on all ranks alike."""
    for pending in under_way:
        if isinstance(pending, _DirectAllReduce):
            pending.begin_gather()


def _is_direct(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


@attrs.frozen
class _Native:
    work: dist.Work
    tensors: tuple[torch.Tensor, ...]
    """Kept alive until awaited."""

    def wait(self) -> None:
        self.work.wait()


def _native(work: dist.Work | None, *tensors: torch.Tensor) -> Pending:
    assert work is not None
    return _Native(work, tensors)


def _parts(whole: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return each rank's part of `whole`: equal ones, but for the last where the length does not divide."""
    length = -(-whole.numel() // group.size())
    return [whole[number * length : (number + 1) * length] for number in range(group.size())]


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start to send `outgoing[p]` to every other rank p and to receive `incoming[p]` from it."""
    works: list[dist.Work | None] = []
    rank, size = group.rank(), group.size()
    for distance in range(1, size):  # everyone begins with another neighbour
        to, source = (rank + distance) % size, (rank - distance) % size
        if incoming[source].numel():
            works.append(_c10d.irecv(incoming[source], group=group, group_src=source, tag=tag))
        if outgoing[to].numel():
            works.append(_c10d.isend(outgoing[to], group=group, group_dst=to, tag=tag))
    return [work for work in works if work is not None]


class _DirectReduce:
    def __init__(self, whole: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._parts, self._share, self._rank = _parts(whole, group), share, group.rank()
        mine = self._parts[self._rank]  # parts of an uneven cut differ in length
        self._received = [mine if p == self._rank else torch.empty_like(mine) for p in range(group.size())]
        self._works = _exchange(self._parts, self._received, group, REDUCE_TAG)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        received, self._received, self._parts = self._received, [], []
        if len(received) == 1:
            self._share.copy_(received[0])
        elif len(received) == 2:
            torch.add(*received, out=self._share)
        else:
            total = received[0].to(torch.promote_types(self._share.dtype, torch.float32), copy=True)
            for part in received[1:]:
                total += part
            self._share.copy_(total)


class _DirectGather:
    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        parts = _parts(whole, group)
        mine = [parts[group.rank()]] * group.size()
        self._works = _exchange(mine, parts, group, GATHER_TAG)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _DirectExchange:
    """Two ranks: each sends all it has, and adds what the other sent."""

    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._whole, self._received = whole, torch.empty_like(whole)
        self._works = _exchange([whole] * 2, [self._received] * 2, group, REDUCE_TAG)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._works:
            self._whole += self._received
        self._works = []


class _DirectAllReduce:
    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._whole, self._group = whole, group
        self._reduce = _DirectReduce(whole, _parts(whole, group)[group.rank()], group)
        self._gather: _DirectGather | None = None

    def begin_gather(self) -> None:
        if self._gather is None:
            self._reduce.wait()
            self._gather = _DirectGather(self._whole, self._group)

    def wait(self) -> None:
        self.begin_gather()
        assert self._gather is not None
        self._gather.wait()
