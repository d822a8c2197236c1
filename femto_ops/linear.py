"""Linear layers that can defer their weight's gradient, which splits backward into two halves."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from femto_ops.deferral import WeightGradients, edges_of


class SplittingLinear(nn.Linear):
    """`nn.Linear` whose backward defers the gradients of weight and bias if `weight_grads` says so."""

    weight_grads: WeightGradients

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_in] -> [..., d_out]."""
        return cast(Tensor, _Linear.apply(x, self.weight, self.bias, self.weight_grads))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grads: WeightGradients) -> Tensor:
        ctx.weight_grads, ctx.edges = weight_grads, edges_of([weight, bias])
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        weight_edge, bias_edge = ctx.edges
        rows, flat = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        found = ctx.weight_grads.compute_or_defer(
            ctx.edges, lambda: [flat.t() @ rows if weight_edge else None, flat.sum(0) if bias_edge else None]
        )
        return dx, *found, None
