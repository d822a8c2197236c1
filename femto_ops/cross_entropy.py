"""Fused head and cross-entropy: the full logits never exist; gradients are computed chunk by chunk in forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden @ weight^T) against `targets`, summed over rows.

    Rows go through the head `chunk` at a time. While a chunk's logits exist, its share of both gradients is computed
    (the method of Liger Kernel, arXiv:2410.10989, section 3.2), and backward only scales them. `HeadGradients` says
    what is saved. Rows whose target is `ignore_index` are left out of every product. Softmax is in fp32 (float64 for
    float64 input). Gradients that are not needed are neither computed nor saved.

    Args:
        hidden: [n, h].
        weight: [v, h], dtype of `hidden`.
        targets: [n] int64, each in 0..v-1 or equal to `ignore_index`.
        ignore_index: the target of ignored rows.
        label_smoothing: share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
        chunk: rows of logits alive at a time; by default as many as fit in `chunk_rows`' budget.

    Returns:
        The sum, a scalar in fp32 (float64 for float64 input); 0 if all rows are ignored.

    Raises:
        ValueError: a shape that does not fit, or `chunk` < 1.
        IndexError: a target outside the vocabulary. On CUDA the check synchronises once per call; if some rows are
            ignored, listing the others synchronises once more.
    """
    check_head_shapes("linear_cross_entropy", hidden, weight, targets)
    v = weight.shape[0]
    rows = chunk_rows(v, hidden.dtype, hidden.device) if chunk is None else chunk
    if rows < 1:
        raise ValueError(f"chunk = {rows}: at least one row of logits must be alive at a time.")
    kept = kept_rows(targets, v, ignore_index)
    # Grad mode is always off inside forward, and needs_input_grad ignores it.
    grad = torch.is_grad_enabled()
    args = (hidden, weight, targets, kept, label_smoothing, rows, grad)
    return cast(Tensor, _LinearCrossEntropy.apply(*args))  # type: ignore[no-untyped-call]


def check_head_shapes(operation: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raise ValueError unless `hidden` is [n, h], `weight` [v, h] and `targets` [n]."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = ", ".join(str(list(t.shape)) for t in (hidden, weight, targets))
        raise ValueError(f"{operation} takes hidden [n, h], weight [v, h], targets [n], not {shapes}.")


def chunk_rows(v: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the default chunk: the rows of `v` logits that fit in 32 MiB on the CPU, 128 MiB elsewhere; at least 128.

    Bytes are counted in the softmax's dtype. With fewer than 128 rows a CPU's matrix products slow down, and each chunk
    passes once over the weight's gradient. Measured with h = 512, v = 8192, one thread: the three products of 512 rows
    take 242 ms at 16 rows per chunk, 165 at 64, 147 at 128, 134 at 512.
    """
    budget = 2**25 if device.type == "cpu" else 2**27
    return max(128, budget // max(1, v * wide(dtype).itemsize))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and softmax: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def kept_rows(targets: Tensor, v: int, ignore_index: int) -> Tensor | None:
    """Return the indices of rows that are not ignored, or None if no row is.

    Raises IndexError for a target that is neither in 0..v-1 nor equal to `ignore_index`.
    """
    if targets.numel() == 0:
        return None
    counts = targets != ignore_index
    wrong = counts & ((targets < 0) | (targets >= v))
    kept, bad = torch.stack((counts.sum(), wrong.sum())).tolist()  # one transfer from the device for both
    if bad:
        row = int(wrong.nonzero()[0])
        raise IndexError(
            f"target {int(targets[row])} at row {row} is outside the vocabulary 0..{v - 1} (ignored rows have "
            f"the target {ignore_index}); so are {bad} of {targets.numel()} targets."
        )
    return None if kept == targets.numel() else counts.nonzero().squeeze(1)


def logit_chunks(
    hidden: Tensor, weight: Tensor, chunk: int, room: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows and their logits [c, v] in the dtype of `hidden` [n, h], `chunk` rows at a time.

    `room` receives the logits. If `room` has n rows, every chunk keeps its own rows; otherwise all chunks use its first
    rows, and each overwrites the one before. By default `room` has the size of one chunk.
    """
    n, v = hidden.shape[0], weight.shape[0]
    room = hidden.new_empty(min(chunk, n), v) if room is None else room
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        part = hidden[rows]  # [c, h]
        out = room[rows] if room.shape[0] == n else room[: part.shape[0]]
        yield rows, torch.mm(part, weight.t(), out=out)


class HeadGradients:
    """The gradients of `hidden` and `weight`, computed from the logits' gradient chunk by chunk.

    The gradient of `hidden` [n, h] is computed at once, in its dtype, so that backward needs no weight. For few rows
    (n < h / 4 or so, as in pipelines and with long vocabularies), the weight's gradient [v, h] is larger than the
    logits' [n, v]; then the logits' gradient is kept, and backward forms the weight's. Otherwise the weight's gradient
    is accumulated chunk by chunk, in fp32 or wider from the second chunk on.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        chunk: int,
        *,
        need_hidden: bool,
        need_weight: bool,
        keep_logits: bool = True,
    ) -> None:
        """If `keep_logits` is off, the logits' gradient is never kept; `results` then returns both gradients."""
        (n, h), v = hidden.shape, weight.shape[0]
        self._hidden, self._weight, self._chunk, self._need_weight = hidden, weight, chunk, need_weight
        whole = v * h * wide(hidden.dtype).itemsize
        self._keeps_logits = keep_logits and need_weight and 4 * n * (v + h) * hidden.dtype.itemsize <= whole
        self._logits = hidden.new_empty(n if self._keeps_logits else min(chunk, n), v)
        self._dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None
        self._dweight: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their logits [c, v], in the dtype of `hidden`; call `take` before the next chunk."""
        return logit_chunks(self._hidden, self._weight, self._chunk, self._logits)

    def take(self, rows: slice, logits: Tensor, pull: Tensor) -> None:
        """Accumulate from `pull`, the gradient of the `logits` that `chunks` yielded; both may be one tensor."""
        if pull is not logits:
            logits.copy_(pull)
        if self._dhidden is not None:
            torch.mm(logits, self._weight, out=self._dhidden[rows])
        if self._need_weight and not self._keeps_logits:
            self._dweight = _add_product(self._dweight, logits.t(), self._hidden[rows])

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `hidden` and `weight`, in their dtypes; None for a gradient that is not needed."""
        assert not self._keeps_logits
        dweight = self._dweight
        if self._need_weight and dweight is None:
            dweight = torch.zeros_like(self._weight)
        return self._dhidden, None if dweight is None else dweight.to(self._weight.dtype)

    def save(self, ctx: Any, kept: Tensor | None, whole: torch.Size) -> None:
        """Save in `ctx` what backward needs; `hidden` holds rows `kept` (None: all) of an input of shape `whole`."""
        ctx.whole, ctx.dtype = whole, self._weight.dtype
        dhidden, dweight = self._dhidden, self._dweight
        late = (self._logits, self._hidden) if self._keeps_logits else (None, None)
        if self._need_weight and dweight is None and not self._keeps_logits:
            dweight = torch.zeros_like(self._weight)
        ctx.save_for_backward(dhidden, kept if dhidden is not None else None, dweight, *late)


class HeadBackward:
    """Backward for what `HeadGradients` saved in `ctx`, given the loss's gradient `grad` (a scalar).

    `hidden` and `weight` may overwrite what was saved, so each may be called once.
    """

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        # Unpack once: under checkpointing or offloading, saved tensors can be unpacked only once.
        self._dhidden, self._kept, self._dweight, self._pull, self._rows = ctx.saved_tensors
        self._whole, self._dtype, self._grad = ctx.whole, ctx.dtype, grad

    def hidden(self) -> Tensor | None:
        """Return the gradient of the rows that are not ignored, or None if it is not needed."""
        return None if self._dhidden is None else _scaled(self._dhidden, self._grad, self._dhidden.dtype)

    def spread(self, dhidden: Tensor | None) -> Tensor | None:
        """Return `dhidden` with rows of zeros for the ignored rows."""
        if dhidden is None or self._kept is None:
            return dhidden
        return dhidden.new_zeros(self._whole).index_copy_(0, self._kept, dhidden)

    def weight(self) -> Tensor | None:
        """Return the weight's gradient, or None if it is not needed."""
        if self._pull is not None:
            return torch.mm(self._pull.t(), (self._rows.to(self._grad.dtype) * self._grad).to(self._rows.dtype))
        return None if self._dweight is None else _scaled(self._dweight, self._grad, self._dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        label_smoothing: float,
        chunk: int,
        grad: bool,
    ) -> Tensor:
        whole = hidden.shape
        need_hidden, need_weight = (grad and need for need in ctx.needs_input_grad[:2])
        if kept is not None:
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        gradients = HeadGradients(hidden, weight, chunk, need_hidden=need_hidden, need_weight=need_weight)
        for rows, logits in gradients.chunks():
            probs = logits.to(total.dtype)  # no copy, unless the logits are narrower than the softmax
            total += _softmax_loss_(probs, targets[rows].unsqueeze(1), label_smoothing, need_hidden or need_weight)
            gradients.take(rows, logits, probs)
        gradients.save(ctx, kept, whole)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = HeadBackward(ctx, grad)
        return saved.spread(saved.hidden()), saved.weight(), *[None] * 5


def _softmax_loss_(logits: Tensor, target: Tensor, smoothing: float, grad: bool) -> Tensor:
    """Return the summed loss of `logits` [c, v] against `target` [c, 1]; overwrite `logits` with its gradient."""
    v = logits.shape[1]
    logits.sub_(logits.amax(1, keepdim=True))
    aim = logits.gather(1, target)  # [c, 1]
    if smoothing:
        aim = aim.mul_(1 - smoothing).add_(logits.mean(1, keepdim=True), alpha=smoothing)
    total = logits.exp_().sum(1, keepdim=True)
    if grad:
        logits.div_(total)
        if smoothing:
            logits.sub_(smoothing / v)
        logits.scatter_(1, target, logits.gather(1, target).sub_(1 - smoothing))
    return total.log().sub_(aim).sum()


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b, in place if possible; from the second product on, narrow dtypes are widened to fp32."""
    if total is None:
        return torch.mm(a, b)
    if total.dtype == a.dtype == wide(a.dtype):
        return total.addmm_(a, b)
    return total.to(wide(a.dtype)).add_(torch.mm(a, b))


def _scaled(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored * scale in `dtype`; in place, unless the graph is retained for another backward.

    The weight's gradient is as large as the head, and backward starts at the peak of memory: a second copy is avoided.
    A scale rounded to bf16 would be off by up to 0.2 % for all gradients alike, so narrow rows are widened, some at a
    time.
    """
    out = torch.empty_like(stored) if torch._C._autograd._get_current_graph_task_keep_graph() else stored
    if stored.dtype == scale.dtype:
        return torch.mul(stored, scale, out=out).to(dtype)
    rows = max(1, 2**23 // stored.shape[1])
    for part, room in zip(torch.split(stored, rows), torch.split(out, rows), strict=True):
        room.copy_(part.to(scale.dtype).mul_(scale))
    return out.to(dtype)
