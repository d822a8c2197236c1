"""The operations whose textbook form wastes memory: RMS norm, SwiGLU, and the head with its cross-entropy.

Each is an autograd function that saves the least its backward needs and works in place on its own temporaries. All
that is a tensor goes through `save_for_backward`, so checkpointing and saved-tensor hooks see it. None of them can be
differentiated twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every row of `x` to unit root mean square, then by `weight` (Zhang and Sennrich 2019, arXiv:1910.07467).

    Statistics are in fp32 (float64 for float64 input), and the normalised rows are rounded to the input's dtype before
    `weight` multiplies them, as in Hugging Face's LlamaRMSNorm. On CUDA torch's own fused kernel takes over where both
    dtypes agree; it rounds once, after the product. Saved for backward: `x`, `weight` and 1 / rms [..., 1].

    Args:
        x: [..., h], floating point.
        weight: [h].
        eps: added to the mean square.

    Returns:
        [..., h] in the promoted dtype of `x` and `weight`.
    """
    if x.is_cuda and x.dtype == weight.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020, arXiv:2002.05202, section 2), saving only `gate` and `up`.

    Both are [..., i] of one shape and dtype, and so is the result. Backward computes silu(gate) again: one pass over
    memory, against a third saved tensor of that size. Different shapes or dtypes raise ValueError.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        shapes = f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"swiglu takes gate and up of one shape and dtype, not {shapes}.")
    return cast(Tensor, _SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]


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
    (the method of Liger Kernel, arXiv:2410.10989, section 3.2), so backward only scales them. Rows whose target is
    `ignore_index` are left out of every product. Softmax is in fp32 (float64 for float64 input); the weight's gradient
    is summed over chunks in fp32 at least. Saved for backward: the gradient of `hidden` for the rows that count
    [rows, h] in its dtype, that of `weight` [v, h] (in fp32 or wider once there are two chunks), and, if rows were left
    out, the index [rows] of those that were not. A gradient that nobody needs is neither computed nor saved.

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
        IndexError: a target outside the vocabulary. Checking costs CUDA one synchronisation per call.
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
    return max(128, budget // max(1, v * _wide(dtype).itemsize))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and softmax: fp32, or float64 for float64."""
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


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x.dtype)
        rows = x.to(wide)
        # A norm needs no temporary of x's size, which squaring x would.
        inverse = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_()
        inverse = inverse.div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        unit = rows * inverse if rows is x else rows.mul_(inverse).to(x.dtype)
        return unit.mul_(weight) if torch.promote_types(x.dtype, weight.dtype) == x.dtype else unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, h = inverse.dtype, x.shape[-1]
        rows, grad, scale = x.to(wide), grad.to(wide), weight.to(wide)
        # With r = 1 / rms: dweight = sum over rows of r grad x, and dx = r (grad w - x r^2 mean(grad w x)). Both sums
        # are matrix-vector products with grad x, so one temporary serves the three results.
        work = torch.mul(grad, rows, out=torch.empty(x.shape, dtype=wide, device=x.device))
        flat = work.view(-1, h)  # [n, h]
        dweight = torch.mv(flat.t(), inverse.reshape(-1)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        pull = torch.mv(flat, scale).view(inverse.shape).mul_(inverse).mul_(inverse).div_(-h)  # [..., 1]
        dx = torch.mul(grad, scale, out=work).addcmul_(rows, pull).mul_(inverse)
        return dx.to(x.dtype), dweight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        dgate = dup = None
        if ctx.needs_input_grad[0]:
            dgate = grad * up
            torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        if ctx.needs_input_grad[1]:
            dup = F.silu(gate).mul_(grad)
        return dgate, dup


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
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype)
        need_hidden, need_weight = (grad and need for need in ctx.needs_input_grad[:2])
        if kept is not None:
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        n, v = hidden.shape[0], weight.shape[0]
        wide = _wide(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None  # [n, h]
        dweight: Tensor | None = None  # [v, h]
        buffer = hidden.new_empty(min(chunk, n), v)
        for start in range(0, n, chunk):
            part = hidden[start : start + chunk]  # [c, h]
            logits = torch.mm(part, weight.t(), out=buffer[: part.shape[0]])  # [c, v]
            target = targets[start : start + chunk].unsqueeze(1)  # [c, 1]
            probs = logits.to(wide)  # the buffer itself, unless it is narrower than the softmax
            total += _softmax_loss_(probs, target, label_smoothing, need_hidden or need_weight)
            pull = probs if probs is logits else logits.copy_(probs)
            if dhidden is not None:
                torch.mm(pull, weight, out=dhidden[start : start + chunk])
            if need_weight:
                dweight = _add_product(dweight, pull.t(), part)
        if need_weight and dweight is None:
            dweight = torch.zeros_like(weight)
        ctx.save_for_backward(dhidden, dweight, kept if need_hidden else None)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight, kept = ctx.saved_tensors
        if dhidden is not None:
            dhidden = _scaled(dhidden, grad, ctx.dtypes[0])
            if kept is not None:
                dhidden = dhidden.new_zeros(ctx.shape).index_copy_(0, kept, dhidden)
        if dweight is not None:
            dweight = _scaled(dweight, grad, ctx.dtypes[1])
        return dhidden, dweight, None, None, None, None, None


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
    if total.dtype == a.dtype == _wide(a.dtype):
        return total.addmm_(a, b)
    return total.to(_wide(a.dtype)).add_(torch.mm(a, b))


def _scaled(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored * scale in `dtype`, in place when this backward is the graph's last use of `stored`.

    The weight's gradient is as large as the head, and backward starts at the peak of memory: no second copy there.
    """
    if stored.dtype != scale.dtype:
        # A scale rounded to bf16 would be wrong by up to 0.2 %, for all gradients alike.
        stored = stored.to(scale.dtype)
        return stored.mul_(scale).to(dtype)
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    return (stored * scale if keep else stored.mul_(scale)).to(dtype)
