"""Peak memory of a training step by phase: forward, backward, update.

On a CPU, live bytes of tensors are counted, operation by operation: what a caching allocator would be asked for,
without its rounding, and without what kernels use inside themselves. On a GPU torch's allocator is asked.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from femto_core.trainer import Trainer


@attrs.frozen
class Phase:
    """Memory of one phase, in bytes."""

    name: str
    peak: int
    after: int
    """What is left at its end."""


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


def measure_step(trainer: Trainer, counter: ByteCounter) -> list[Phase]:
    """Return the phases of a step that is not the first: the optimizer has its state. Values may be NaN.

    With several micro-batches, forward and backward are those with the highest peak.
    """
    found: dict[str, Phase] = {}
    current = "forward"

    def enter(name: str) -> None:
        nonlocal current
        peak = max(counter.take_peak(), found[current].peak if current in found else 0)
        found[current] = Phase(current, peak, counter.live())
        current = name

    def loss(hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor) -> torch.Tensor:
        result = trainer.loss(hidden, head, targets)
        enter("backward")
        return result

    scale = torch.ones((), dtype=torch.float64, device=trainer.mesh.device)
    handle = trainer.stage.body.register_forward_pre_hook(lambda *_: enter("forward"))
    for _ in range(2):
        counter.take_peak()
        found.clear()
        current = "forward"
        micro_batches = trainer.loader.next_step()
        trainer.schedule.run(trainer.stage, micro_batches, loss, scale, trainer.grad_sync)
        trainer.grad_sync.sync_gradients()
        trainer.sharding.reduce_grads()
        enter("update")
        trainer.update(1.0)
        trainer.sharding.gather_weights()
        trainer.precision.zero_grad(trainer.groups)
        trainer.sharding.post_step()
        enter("forward")
    handle.remove()
    return [found[name] for name in ("forward", "backward", "update")]
