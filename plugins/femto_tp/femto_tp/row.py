"""RowParallelLinear: W [d_out, d_in] sharded on its input dimension (Shoeybi et al. 2019, section 3).

Forward: y = sum over k of x_k W_k^T, by all-reduce; the bias is added once, afterwards. Backward is local:
dx_k = dy W_k and dW_k = dy^T x_k.
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
from femto_tp.sequence import SEQUENCE, SequenceShards


class RowParallelLinear(nn.Module):
    """A linear layer of which this rank takes some inputs."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        ranks: Ranks,
        weight_grads: WeightGradients,
        sequence: SequenceShards | None = None,
    ) -> None:
        """`weight` [d_out, inputs of this rank] is this rank's shard; `bias` [d_out] is whole on every rank."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self._ranks, self._weight_grads, self._sequence = ranks, weight_grads, sequence

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, inputs of this rank] -> [b, s, d_out], or this rank's part of s under sequence parallelism."""
        y = cast(Tensor, _RowLinear.apply(x, self.weight, self._ranks, self._weight_grads, self._sequence))  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features} of this rank, out_features={self.out_features}"


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ranks: Ranks,
        weight_grads: WeightGradients,
        sequence: SequenceShards | None,
    ) -> Tensor:
        ctx.ranks, ctx.weight_grads, ctx.in_sequence = ranks, weight_grads, sequence is not None
        ctx.edges = edges_of([weight])
        ctx.save_for_backward(x, weight)
        partial = F.linear(x, weight)
        if _get_current_dispatch_mode() is not None:  # a mode may have kept the product; do not overwrite it
            partial = partial.clone()
        return ranks.sum(partial) if sequence is None else ranks.scatter_sum(sequence.pad(partial), SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        whole = ctx.ranks.gather(grad, SEQUENCE) if ctx.in_sequence else grad
        dx = whole @ weight if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[1]
        (dweight,) = ctx.weight_grads.compute_or_defer(
            ctx.edges, lambda: [whole.flatten(0, -2).t() @ x.flatten(0, -2) if needed else None]
        )
        return dx, dweight, None, None, None
