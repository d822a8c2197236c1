"""Messages between a pipeline's ranks, over one process group for each (sender, receiver, direction).

Since each channel has its own group, channels cannot block each other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from femto_core.mesh import Mesh
from femto_ops.collectives import c10d
from femto_pp.lowering import Channel, channels
from femto_pp.placement import Placement

PP = "pp"


class Links:
    """Asynchronous sends and receives along channels. Built by every rank of the world.

    A round-robin pipeline of p ranks with one chunk each has 2 (p - 1) channels, so that a world of n ranks builds
    2 (p - 1) n / p groups: almost two per rank. Every rank takes part in building every group, one after another. At
    1,024 ranks this means about 2,000 groups at start-up, each with a barrier of all ranks; the work grows as n
    squared. A rank sends and receives through at most four of the groups, so that its buffers do not grow with n.
    """

    def __init__(self, mesh: Mesh, placement: Placement) -> None:
        lines = mesh.lines(PP)
        self._groups = {
            channel: mesh.new_groups([[line[channel[0]], line[channel[1]]] for line in lines])
            for channel in channels(placement)
        }
        self._is_gloo = mesh.device.type == "cpu"
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="pipeline-sends")
        self._sending: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        """(is it done, wait for it) of each send in flight."""

    def send(self, tensor: torch.Tensor, channel: Channel) -> None:
        """Start a send. The tensor is kept alive until the send is done, but no longer."""
        tensor = tensor.contiguous()
        group = self._groups[channel]
        assert group is not None, f"no group for {channel}"
        work = c10d.isend(tensor, group=group, group_dst=_group_rank(channel, channel[1]))
        if self._is_gloo:  # gloo cannot tell whether a send is done, so a thread waits for it
            future = self._waiter.submit(_wait, work, tensor)
            self._sending.append((future.done, future.result))
        else:
            self._sending.append((work.is_completed, lambda: _wait(work, tensor)))
        self._sending = [(done, wait) for done, wait in self._sending if not (done() and _ended(wait))]

    def receive(self, buffer: torch.Tensor, channel: Channel) -> dist.Work:
        """Start to receive into `buffer`."""
        group = self._groups[channel]
        assert group is not None, f"no group for {channel}"
        work: dist.Work = c10d.irecv(buffer, group=group, group_src=_group_rank(channel, channel[0]))
        return work

    def drain(self) -> None:
        """Wait until all sends are done."""
        for _, wait in self._sending:
            wait()
        self._sending = []

    def close(self) -> None:
        """End the thread that waits for sends."""
        self._waiter.shutdown(wait=False)


def _ended(wait: Callable[[], object]) -> bool:
    """Return True for a send that is done; raise its error if it failed."""
    wait()
    return True


def _wait(work: dist.Work, _tensor: torch.Tensor) -> None:
    """Wait for a send; the argument keeps its tensor alive until then."""
    work.wait()


def _group_rank(channel: Channel, rank: int) -> int:
    """Return a rank's number in its channel's group. A group numbers its ranks in ascending order."""
    return int(rank > min(channel[0], channel[1]))
