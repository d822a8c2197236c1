"""Asynchronous collectives on flat buckets, each over one process group.

On NCCL, torch's own collectives run. On gloo, torch's reduce-scatter and all-gather take three to four times as long as
direct sends of the same bytes (128 MiB over two processes of one machine: 180 and 127 ms, against 40 and 30). So on
gloo every rank sends each other rank its part directly, as many bytes as a ring would. The part's owner then sums it in
the order of ranks, in fp32 or wider: the result does not depend on timing, and bf16 is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

ONE_ROUND_BYTES = 2**23
"""Up to this size, an all-reduce over two ranks swaps whole buckets: as many bytes, but one round in place of two."""
REDUCE_TAG, GATHER_TAG = 71, 72  # distinct, so that a gather may overtake a reduce on some ranks only
c10d: Any = dist
"""torch.distributed without types, for what its stubs lack: stores, `group_src` and `group_dst`."""
# torch is renaming these two functions, and the old names warn.
_reduce_scatter = getattr(c10d, "reduce_scatter_single", None) or c10d.reduce_scatter_tensor
_all_gather = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor


class Pending(Protocol):
    """A collective in flight. Its tensors must be neither read nor written before `wait` has returned."""

    def wait(self) -> None:
        """Return when the result is ready (on CUDA: ready for kernels that are enqueued from now on)."""


def reduce_scatter(whole: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to sum `whole` [w * n] over the w ranks; `share` [n] receives this rank's part of the sum.

    `share` may be this rank's part of `whole` itself. All ranks must start their collectives in the same order.
    """
    if _is_direct(group):
        return _DirectReduce(whole, share, group)
    return _native(_reduce_scatter(share, whole, group=group, async_op=True), whole, share)


def all_gather(whole: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to fill `whole` [w * n], in which this rank's part [n] is set, with the other ranks' parts."""
    if _is_direct(group):
        return _DirectGather(whole, group)
    return _native(_all_gather(whole, _parts(whole, group)[group.rank()], group=group, async_op=True), whole)


def all_reduce(whole: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to sum `whole`, which must be contiguous, over ranks in place."""
    if _is_direct(group):
        small = group.size() == 2 and whole.nbytes <= ONE_ROUND_BYTES
        return _DirectExchange(whole.view(-1), group) if small else _DirectAllReduce(whole.view(-1), group)
    return _native(dist.all_reduce(whole, group=group, async_op=True), whole)


def advance(in_flight: Sequence[Pending]) -> None:
    """Start the second half (the gather) of every two-phase all-reduce in flight, once its first half is done.

    All ranks must call it with the same collectives in the same order.
    """
    for pending in in_flight:
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
    """Return each rank's part of `whole`; the last ones are shorter if the length does not divide."""
    length = -(-whole.numel() // group.size())
    return [whole[number * length : (number + 1) * length] for number in range(group.size())]


def _exchange(
    outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start to send `outgoing[p]` to every other rank p and to receive `incoming[p]` from it."""
    works: list[dist.Work | None] = []
    rank, size = group.rank(), group.size()
    for distance in range(1, size):  # each rank starts with a different neighbour
        to, source = (rank + distance) % size, (rank - distance) % size
        if incoming[source].numel():
            works.append(c10d.irecv(incoming[source], group=group, group_src=source, tag=tag))
        if outgoing[to].numel():
            works.append(c10d.isend(outgoing[to], group=group, group_dst=to, tag=tag))
    return [work for work in works if work is not None]


class _DirectReduce:
    def __init__(self, whole: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._parts, self._share, self._rank = _parts(whole, group), share, group.rank()
        mine = self._parts[self._rank]  # if the length does not divide, parts differ in length
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
    """All-reduce over two ranks: each sends its whole bucket, and adds the other's."""

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
