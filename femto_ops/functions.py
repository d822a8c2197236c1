"""RMS norm and SwiGLU, whose textbook forms save more for backward than they need.

Each is an autograd function that saves a minimum and works in place on its own temporaries. All saved tensors go
through `save_for_backward`, so checkpointing and saved-tensor hooks see them. Neither can be differentiated twice.
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
    `weight` multiplies them, as in Hugging Face's LlamaRMSNorm. On CUDA, if both dtypes agree, torch's fused kernel
    runs instead and rounds once, after the product. Saved for backward: `x`, `weight` and 1 / rms [..., 1].

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

    Both inputs and the result are [..., i], of the same dtype; otherwise ValueError. Backward computes silu(gate)
    again, which costs one pass over memory and saves a tensor of that size.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        shapes = f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"swiglu takes gate and up of the same shape and dtype, not {shapes}.")
    return cast(Tensor, _SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = x.to(dtype)
        # vector_norm needs no temporary of x's size; squaring x would.
        inverse = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_()
        inverse = inverse.div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        unit = rows * inverse if rows is x else rows.mul_(inverse).to(x.dtype)
        return unit.mul_(weight) if torch.promote_types(x.dtype, weight.dtype) == x.dtype else unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        dtype, h = inverse.dtype, x.shape[-1]
        rows, grad, scale = x.to(dtype), grad.to(dtype), weight.to(dtype)
        # With r = 1 / rms: dweight = sum over rows of r grad x, and dx = r (grad w - x r^2 mean(grad w x)). The sum and
        # the mean are matrix-vector products with grad x, so one temporary is enough.
        work = torch.mul(grad, rows, out=torch.empty(x.shape, dtype=dtype, device=x.device))
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
