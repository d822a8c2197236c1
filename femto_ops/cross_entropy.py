"""The cross-entropy of a head, whose logits never exist in full, and the gradients made while a part of them does."""

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
    """Sum over rows of the cross-entropy of softmax(hidden @ weight^T) against `targets`, logits never held in full.

    Rows go through the head `chunk` at a time, and while a chunk's logits exist its share of both gradients is computed
    (the method of Liger Kernel, arXiv:2410.10989, section 3.2), so backward only scales them: see `HeadGradients` for
    what is saved. Rows whose target is `ignore_index` are left out of every product. Softmax is in fp32 (float64 for
    float64 input). A gradient that nobody needs is neither computed nor saved.

    Args:
        hidden: [n, h].
        weight: [v, h], dtype of `hidden`.
        targets: [n] int64, each in 0..v-1 or equal to `ignore_index`.
        ignore_index: the target of rows that do not count.
        label_smoothing: share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
        chunk: rows of logits alive at once; by default as many as fit in `chunk_rows`' budget.

    Returns:
        The sum, a scalar in fp32 (float64 for float64 input); 0 when no row counts.

    Raises:
        ValueError: a shape that does not fit, or `chunk` < 1.
        IndexError: a target outside the vocabulary. Checking costs CUDA one synchronisation per call, and listing the
            rows that count another where some are left out.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = ", ".join(str(list(t.shape)) for t in (hidden, weight, targets))
        raise ValueError(f"linear_cross_entropy takes hidden [n, h], weight [v, h], targets [n], not {shapes}.")
    v = weight.shape[0]
    rows = chunk_rows(v, hidden.dtype, hidden.device) if chunk is None else chunk
    if rows < 1:
        raise ValueError(f"chunk = {rows}: at least one row of logits must be alive at a time.")
    kept = kept_rows(targets, v, ignore_index)
    # Inside forward grad mode is always off and needs_input_grad ignores it, so it is asked for here.
    grad = torch.is_grad_enabled()
    args = (hidden, weight, targets, kept, label_smoothing, rows, grad)
    return cast(Tensor, _LinearCrossEntropy.apply(*args))  # type: ignore[no-untyped-call]


def chunk_rows(v: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of `v` logits are alive at once: 32 MiB in the softmax's dtype, four times that off the CPU.

    At least 128: below that a CPU's matrix products lose a fifth of their speed and more (measured with h = 512,
    v = 8192, one thread: the three products of 512 rows take 242 ms at 16 rows a chunk, 165 at 64, 147 at 128, 134 at
    512), and every chunk passes once over the weight's gradient.
    """
    budget = 2**25 if device.type == "cpu" else 2**27
    return max(128, budget // max(1, v * wide(dtype).itemsize))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and softmax: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def kept_rows(targets: Tensor, v: int, ignore_index: int) -> Tensor | None:
    """Return the index of the rows that count, or None if all do; raise IndexError for a target outside 0..v-1."""
    if targets.numel() == 0:
        return None
    counts = targets != ignore_index
    wrong = counts & ((targets < 0) | (targets >= v))
    kept, bad = torch.stack((counts.sum(), wrong.sum())).tolist()  # one transfer for both
    if bad:
        row = int(wrong.nonzero()[0])
        raise IndexError(
            f"target {int(targets[row])} at row {row} is outside the vocabulary 0..{v - 1} (rows to leave out "
            f"carry {ignore_index}); {bad} of {targets.numel()} targets are."
        )
    return None if kept == targets.numel() else counts.nonzero().squeeze(1)


class HeadGradients:
    """The gradients of hidden @ weight^T by both of them, from those of its logits, of which a chunk exists at a time.

    That of `hidden` [n, h] is made at once, in its dtype, so that backward needs no weight. That of `weight` [v, h] is
    larger than the logits' own where rows are few (n < h / 4 or so), as in pipelines and on long vocabularies. Then
    the logits' gradient [n, v] is kept, and backward makes the product; otherwise it is summed over chunks, in fp32 at
    least once there are two.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, chunk: int, *, need_hidden: bool, need_weight: bool) -> None:
        (n, h), v = hidden.shape, weight.shape[0]
        self._hidden, self._weight, self._chunk, self._need_weight = hidden, weight, chunk, need_weight
        whole = v * h * wide(hidden.dtype).itemsize
        self._keeps_logits = need_weight and 4 * n * (v + h) * hidden.dtype.itemsize <= whole
        self._logits = hidden.new_empty(n if self._keeps_logits else min(chunk, n), v)
        self._dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None
        self._dweight: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and their logits [c, v], in the dtype of `hidden`. `take` their gradient before the next."""
        for start in range(0, self._hidden.shape[0], self._chunk):
            rows = slice(start, start + self._chunk)
            part = self._hidden[rows]  # [c, h]
            room = self._logits[rows] if self._keeps_logits else self._logits[: part.shape[0]]
            yield rows, torch.mm(part, self._weight.t(), out=room)

    def take(self, rows: slice, logits: Tensor, pull: Tensor) -> None:
        """Take in the loss's gradient `pull` by the `logits` that `chunks` yielded, whose memory it may be."""
        if pull is not logits:
            logits.copy_(pull)
        if self._dhidden is not None:
            torch.mm(logits, self._weight, out=self._dhidden[rows])
        if self._need_weight and not self._keeps_logits:
            self._dweight = _add_product(self._dweight, logits.t(), self._hidden[rows])

    def save(self, ctx: Any, kept: Tensor | None, whole: torch.Size) -> None:
        """Save what backward needs. The rows of `hidden` are those at `kept` of `whole` [n, h], or all of them."""
        ctx.whole, ctx.dtype = whole, self._weight.dtype
        dhidden, dweight = self._dhidden, self._dweight
        late = (self._logits, self._hidden) if self._keeps_logits else (None, None)
        if self._need_weight and dweight is None and not self._keeps_logits:
            dweight = torch.zeros_like(self._weight)
        ctx.save_for_backward(dhidden, kept if dhidden is not None else None, dweight, *late)


class HeadBackward:
    """What `HeadGradients` saved in `ctx`, to be multiplied by the scalar `grad`; each method once."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        # Read once: tensors that come back from checkpointing or from the host come once.
        self._dhidden, self._kept, self._dweight, self._pull, self._rows = ctx.saved_tensors
        self._whole, self._dtype, self._grad = ctx.whole, ctx.dtype, grad

    def hidden(self) -> Tensor | None:
        """Return the gradient of the rows that count, or None if nobody needs it."""
        return None if self._dhidden is None else _scaled(self._dhidden, self._grad, self._dhidden.dtype)

    def spread(self, dhidden: Tensor | None) -> Tensor | None:
        """Put the rows that count among those that do not, whose gradient is zero."""
        if dhidden is None or self._kept is None:
            return dhidden
        return dhidden.new_zeros(self._whole).index_copy_(0, self._kept, dhidden)

    def weight(self) -> Tensor | None:
        """Return the weight's gradient, or None if nobody needs it."""
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
            probs = logits.to(total.dtype)  # the logits themselves, unless they are narrower than the softmax
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
    """Return the summed loss of `logits` [c, v] against `target` [c, 1]; leave the loss's gradient in `logits`."""
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
    """Return total + a @ b, in place where it can be; narrow dtypes widen to fp32 with the second addend."""
    if total is None:
        return torch.mm(a, b)
    if total.dtype == a.dtype == wide(a.dtype):
        return total.addmm_(a, b)
    return total.to(wide(a.dtype)).add_(torch.mm(a, b))


def _scaled(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored * scale in `dtype`, in place when this backward is the graph's last use of `stored`.

    The weight's gradient is as large as the head, and backward starts at the peak of memory: no second copy there. A
    scale rounded to bf16 would be wrong by up to 0.2 %, for all gradients alike, so narrow rows are widened, some at a
    time.
    """
    out = torch.empty_like(stored) if torch._C._autograd._get_current_graph_task_keep_graph() else stored
    if stored.dtype == scale.dtype:
        return torch.mul(stored, scale, out=out).to(dtype)
    rows = max(1, 2**23 // stored.shape[1])
    for part, room in zip(torch.split(stored, rows), torch.split(out, rows), strict=True):
        room.copy_(part.to(scale.dtype).mul_(scale))
    return out.to(dtype)
