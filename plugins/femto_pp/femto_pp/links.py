"""The wires between a pipeline's ranks: one process group for each channel, so that none waits behind another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from femto_core.mesh import Mesh
from femto_pp.lowering import Channel, channels
from femto_pp.placement import Placement

PP = "pp"
_c10d: Any = dist


class Links:
    """Sends and receives along channels, started now and awaited later. Built by every rank of the world."""

    def __init__(self, mesh: Mesh, placement: Placement) -> None:
        lines = mesh.lines(PP)
        self._groups = {
            channel: mesh.new_groups([[line[channel[0]], line[channel[1]]] for line in lines])
            for channel in channels(placement)
        }
        self._is_gloo = mesh.device.type == "cpu"
        self._reaper = ThreadPoolExecutor(1, thread_name_prefix="pipeline-sends")
        self._sending: list[tuple[Callable[[], bool], Callable[[], object]]] = []

    def send(self, tensor: torch.Tensor, channel: Channel) -> None:
        """Start to send; the tensor is kept until it is gone, but no longer."""
        tensor = tensor.contiguous()
        group = self._groups[channel]
        assert group is not None, f"no group for {channel}"
        work = _c10d.isend(tensor, group=group, group_dst=_place(channel, channel[1]))
        if self._is_gloo:  # which cannot be asked whether it is done, only waited for
            future = self._reaper.submit(_hold, work, tensor)
            self._sending.append((future.done, future.result))
        else:
            self._sending.append((work.is_completed, lambda: _hold(work, tensor)))
        self._sending = [(done, wait) for done, wait in self._sending if not (done() and _ended(wait))]

    def receive(self, buffer: torch.Tensor, channel: Channel) -> dist.Work:
        """Start to receive into `buffer`."""
        group = self._groups[channel]
        assert group is not None, f"no group for {channel}"
        work: dist.Work = _c10d.irecv(buffer, group=group, group_src=_place(channel, channel[0]))
        return work

    def drain(self) -> None:
        """Return when everything that was sent is gone."""
        for _, wait in self._sending:
            wait()
        self._sending = []

    def close(self) -> None:
        """End the thread that waits for sends."""
        self._reaper.shutdown(wait=False)


def _ended(wait: Callable[[], object]) -> bool:
    """Raise what a send that is over failed with."""
    wait()
    return True


def _hold(work: dist.Work, _tensor: torch.Tensor) -> None:
    work.wait()


def _place(channel: Channel, rank: int) -> int:
    """Return a rank's number in its channel's group, which counts in ascending order."""
    return int(rank > min(channel[0], channel[1]))
