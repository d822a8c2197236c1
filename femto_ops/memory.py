"""Counters of tensor memory.

On a CPU, live bytes are counted operation by operation: the bytes requested from an allocator, without its rounding and
without temporaries inside kernels. On a GPU, torch's allocator reports them.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ByteCounter(Protocol):
    """Counts the bytes of live tensors."""

    def live(self) -> int:
        """Return the live bytes."""

    def take_peak(self) -> int:
        """Return the maximum of live bytes since the last call."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages on one type of device that are created while the mode is active, as long as they live.

    A storage that was resized in place counts with its current size.
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
        made = {key: storage for key, storage in self._storages_of(result) if not self._knows(key)}
        if made:
            given = {key for key, _ in self._storages_of((args, kwargs))}  # a view of an older tensor is not new
            self._storages |= {key: weakref.ref(storage) for key, storage in made.items() if key not in given}
        self._peak = max(self._peak, self.live())
        return result

    def _knows(self, key: int) -> bool:
        known = self._storages.get(key)  # a new storage may have the address of a freed one
        return known is not None and known() is not None

    def _storages_of(self, values: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                yield storage._cdata, storage


class AllocatorBytes:
    """Reads torch's CUDA allocator."""

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
    """Count memory of `device` within the context. On a CPU, tensors created before it are not counted."""
    if device.type == "cuda":
        yield AllocatorBytes(device)
        return
    with LiveBytes(device) as counter:
        yield counter


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory used so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def free_memory(device: torch.device) -> int:
    """Return the bytes that `device` can still give; for a CPU, of memory without swap, where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else sys.maxsize


def gib(size: float) -> str:
    """Return `size` in bytes as text, in GiB."""
    return f"{size / 2**30:,.1f} GiB"
