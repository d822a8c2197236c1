"""Gradients on their way to other ranks: collected in flat buckets, which every rank sends in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn

from femto_core.model import Stage

ALIGNMENT = 16
"""Elements: every tensor in a vector, and every rank's share of the vector, begins at a multiple of this."""


@attrs.frozen
class FlatLayout:
    """Tensors laid end to end in one vector [shares * share_numel], which is cut into equal shares."""

    sizes: tuple[int, ...]
    """Elements of each tensor."""
    shares: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor begins."""
        starts, end = [], 0
        for size in self.sizes:
            starts.append(end)
            end += _aligned(size)
        return tuple(starts)

    @property
    def share_numel(self) -> int:
        """Elements of one share, padding included."""
        total = sum(_aligned(size) for size in self.sizes)
        return _aligned((total + self.shares - 1) // self.shares)

    @property
    def numel(self) -> int:
        """Elements of the whole vector."""
        return self.share_numel * self.shares

    def owned(self, share: int) -> list[tuple[int, int]]:
        """Return for each tensor the range of its elements that lies in a share; (0, 0) if there are none."""
        low, high = share * self.share_numel, (share + 1) * self.share_numel
        ranges = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            first, last = max(low - start, 0), min(high - start, size)
            ranges.append((first, last) if first < last else (0, 0))
        return ranges

    def cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor's part [size] of the whole vector."""
        return [vector[start : start + size] for start, size in zip(self.starts, self.sizes, strict=True)]

    def cut_share(self, vector: torch.Tensor, share: int) -> list[torch.Tensor]:
        """Return each tensor's part of a share [share_numel]: the ranges that `owned` names."""
        low = share * self.share_numel
        parts = []
        for start, (first, last) in zip(self.starts, self.owned(share), strict=True):
            begin = start + first - low if first < last else 0
            parts.append(vector[begin : begin + last - first])
        return parts


def backward_order(stage: Stage) -> list[str]:
    """Return the names of a stage's parameters in about the order in which backward completes them.

    It is the order of registration reversed, except that within a layer 1-D parameters go last. Hugging Face models
    register norms after the matrices, but the input norm's gradient is the layer's last in backward, so a bucket that
    begins with it could not be sent earlier anyway.
    """
    parameters = dict(stage.named_parameters())
    layers = [f"{name}." for name, _ in stage.named_layers()]

    def layer_of(name: str) -> str:
        return next((layer for layer in layers if name.startswith(layer)), name)

    runs = [list(run) for _, run in itertools.groupby(reversed(list(parameters)), layer_of)]
    return [name for run in runs for name in sorted(run, key=lambda name: parameters[name].ndim < 2)]


class Bucket:
    """Parameters whose gradients travel together, as parts of one flat tensor, in the parameters' order.

    `flat` has memory from the first gradient on, until `release`. Its dtype is that of sums while more micro-batches
    follow, otherwise the dtype in which it is sent.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        at_end: bool = False,
    ) -> None:
        """Sums are kept in `dtype` and sent in `wire_dtype` along `group`; without a group nothing is sent.

        `at_end`: sent only when backward is over. The ranks of a pipeline wait for each other's backward, so they must
        not wait for each other inside it.
        """
        self.at_end = at_end
        self.parameters = list(parameters)
        for parameter in self.parameters:
            # Reset, because otherwise autograd would sum a tied weight's gradients in last step's dtype.
            parameter.grad_dtype = None
        self.dtype, self.wire_dtype, self.group = dtype, wire_dtype, group
        self.flat_layout = FlatLayout(tuple(p.numel() for p in self.parameters), group.size() if group else 1)
        self.waiting = set(self.parameters)
        """Parameters that have no gradient yet in the backward in progress."""
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._filled: set[nn.Parameter] = set()
        self.release()

    def collect(self, parameter: nn.Parameter, *, more_to_come: bool) -> None:
        """Move a parameter's gradient into the bucket, adding to the sum so far."""
        grad = parameter.grad
        assert grad is not None
        dtype = self.dtype if more_to_come else self.wire_dtype
        if parameter in self._filled:
            self._views[parameter].add_(grad)
        elif grad.numel() == self.flat_layout.numel and grad.dtype == dtype and grad.is_contiguous():
            self._take(grad.view(-1))  # alone in its bucket, as embeddings often are: the gradient becomes the bucket
        else:
            if not self._filled:
                self._allocate(dtype)
            self._views[parameter].copy_(grad)
        self._filled.add(parameter)
        parameter.grad = None

    def fill_gaps(self) -> None:
        """Write zeros where no gradient came: a parameter that is unused here may have been used on another rank."""
        if not self._filled:
            self._allocate(self.wire_dtype)
        for parameter, view in self._views.items():
            if parameter not in self._filled:
                view.zero_()

    def narrow(self) -> torch.Tensor:
        """Convert the sums to `wire_dtype`, in place of the wider ones; return them."""
        if self.flat.dtype != self.wire_dtype:
            self._take(self.flat.to(self.wire_dtype))
        return self.flat

    def hand_over(self) -> None:
        """Make each parameter's `grad` its part of the bucket; the next step begins a new sum."""
        for parameter, view in self._views.items():
            parameter.grad = view
        self._filled.clear()
        if len(self.parameters) == 1:  # the next step's gradient becomes the bucket, so this memory is not needed again
            self.release()

    def release(self) -> None:
        """Drop the memory of the sums."""
        self.flat = torch.empty(0)
        """The sums so far; parts of parameters without a gradient have no values before `fill_gaps`."""
        self._views = {}
        self._filled.clear()

    def _allocate(self, dtype: torch.dtype) -> None:
        if self._views and self.flat.dtype == dtype:
            return
        self._take(torch.empty(self.flat_layout.numel, dtype=dtype, device=self.parameters[0].device))

    def _take(self, flat: torch.Tensor) -> None:
        self.flat = flat
        parts = self.flat_layout.cut(flat)
        self._views = {p: part.view_as(p) for p, part in zip(self.parameters, parts, strict=True)}


class GradientCollector:
    """Watches parameters, moves each gradient into its bucket as backward produces it, and sends full buckets.

    Buckets are sent in the order given, not in the order in which they fill, so that ranks which used different
    parameters still meet in the same collectives.
    """

    def __init__(self, buckets: Sequence[Bucket], send: Callable[[Bucket], None]) -> None:
        self.buckets = list(buckets)
        self.holding = False
        """While set, gradients are only collected."""
        self._send = send
        self._sent = 0
        self._home = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._handles = [p.register_post_accumulate_grad_hook(self._on_grad) for p in self._home]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Prepare for a backward after which buckets are sent."""
        self._sent = 0
        for bucket in self.buckets:
            bucket.waiting = set(bucket.parameters)

    def flush(self) -> None:
        """After backward: send the remaining buckets, with zeros for parameters that got no gradient."""
        for bucket in self.buckets[self._sent :]:
            bucket.fill_gaps()
            bucket.waiting.clear()
        self._send_full(at_end=True)

    def finish(self, buckets: Sequence[Bucket]) -> None:
        """Send these buckets, with zeros for parameters that got no gradient: backward is past them.

        Called at the same point of backward on every rank; ranks need not have used the same parameters.
        """
        if not self.holding:
            for bucket in buckets:
                if bucket.waiting:
                    bucket.fill_gaps()
                    bucket.waiting.clear()
            self._send_full()

    def close(self) -> None:
        """Stop watching; drop the buckets."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._home, self.buckets = [], {}, []

    def _on_grad(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:  # deferred: torch calls hooks even where a backward returned None
            return
        bucket = self._home[parameter]
        if not self.holding and parameter not in bucket.waiting:
            raise RuntimeError("a gradient came twice in one step: an earlier backward failed; build a new trainer")
        bucket.collect(parameter, more_to_come=self.holding)
        if not self.holding:
            bucket.waiting.remove(parameter)
            self._send_full()

    def _send_full(self, *, at_end: bool = False) -> None:
        for bucket in self.buckets[self._sent :]:
            if bucket.waiting or (bucket.at_end and not at_end):
                return
            self._sent += 1
            self._send(bucket)


def _aligned(numel: int) -> int:
    return (numel + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
