"""Counting the memory of tensors.

On a CPU, live bytes are counted operation by operation: what a caching allocator would be asked for, without its
rounding, and without what kernels use inside themselves. On a GPU torch's allocator is asked.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteCounter(Protocol):
    """Knows how much memory tensors have."""

    def live(self) -> int:
        """Return the bytes alive now."""

    def take_peak(self) -> int:
        """Return the most bytes alive at a time since this was last called."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts all storages on one type of device that are made while it is on, as long as they live.

    A storage that was emptied in place counts for what it has left.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak = 0

    def live(self) -> int:
        alive = ((key, ref()) for key, ref in self._storages.items())
        sizes = {key: storage.nbytes() for key, storage in alive if storage is not None}
        self._storages = {key: self._storages[key] for key in sizes}
        return sum(sizes.values())

    def take_peak(self) -> int:
        peak, self._peak = max(self._peak, self.live()), self.live()
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self._peak = max(self._peak, self.live())
        return result


class AllocatorBytes:
    """Asks torch's CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def live(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


@contextlib.contextmanager
def counting(device: torch.device) -> Iterator[ByteCounter]:
    """Count memory of `device` inside. On a CPU what was made before is not seen: build the trainer inside too."""
    if device.type == "cuda":
        yield AllocatorBytes(device)
        return
    with LiveBytes(device) as counter:
        yield counter
