"""RowParallelLinear: W [d_out, d_in] cut on its input dimension.

Forward y = sum over k of x_k W_k^T, by all-reduce, and then the bias, once. Backward is local: dx_k = dy W_k,
dW_k = dy^T x_k.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from femto_ops.deferral import WeightGradients, edges_of
from femto_tp.ranks import Ranks, saved
from femto_tp.sequence import SEQUENCE, Sequence


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank holds some inputs."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        ranks: Ranks,
        later: WeightGradients,
        sequence: Sequence | None = None,
    ) -> None:
        """`weight` [d_out, inputs of this rank] is this rank's part; `bias` [d_out] is whole, on every rank."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self._ranks, self._later, self._sequence = ranks, later, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, inputs of this rank] -> [b, s, d_out]; under sequence parallelism this rank's part of s."""
        y = cast(Tensor, _RowLinear.apply(x, self.weight, self._ranks, self._later, self._sequence))  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features} of this rank, out_features={self.out_features}"


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ranks: Ranks, later: WeightGradients, sequence: Sequence | None
    ) -> Tensor:
        ctx.ranks, ctx.later, ctx.in_sequence = ranks, later, sequence is not None
        ctx.edges = edges_of([weight])
        ctx.save_for_backward(x, weight)
        partial = F.linear(x, weight)
        if _get_current_dispatch_mode() is not None:  # who may have kept the product: it is not ours to sum into
            partial = partial.clone()
        return ranks.sum(partial) if sequence is None else ranks.scatter_sum(sequence.pad(partial), SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        whole = ctx.ranks.gather(grad, SEQUENCE) if ctx.in_sequence else grad
        dx = whole @ weight if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[1]
        (dweight,) = ctx.later.now_or_later(
            ctx.edges, lambda: [whole.flatten(0, -2).t() @ x.flatten(0, -2) if needed else None]
        )
        return dx, dweight, None, None, None
