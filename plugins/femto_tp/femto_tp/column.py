"""ColumnParallelLinear: W [d_out, d_in] sharded on its output dimension (Shoeybi et al. 2019, section 3).

Forward: y_k = x W_k^T + b_k, without communication. Backward: dW_k = dy_k^T x and db_k are local. Each rank has the
partial sum dy_k W_k of dx; an all-reduce sums it while the weights' gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from femto_ops.collectives import Pending
from femto_ops.deferral import WeightGradients, edges_of
from femto_tp.ranks import Ranks, saved, side_by_side
from femto_tp.regions import copy_to_tp_region
from femto_tp.sequence import SEQUENCE, SequenceShards


class ColumnParallelLinear(nn.Module):
    """A linear layer of which this rank computes some outputs, as a member of a `ColumnGroup`."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ColumnGroup, replicas: Ranks | None = None
    ) -> None:
        """`weight` [outputs of this rank, d_in] and `bias` [outputs of this rank] are this rank's shards.

        If several ranks hold the same shard, they are the `replicas`, and their gradients are summed.
        """
        super().__init__()
        self.weight, self.bias, self.replicas = weight, bias, replicas
        self.out_features, self.in_features = weight.shape
        self.group = group
        group.members.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, d_in] -> [b, s, outputs of this rank]."""
        return self.group.output_of(self, x)

    def shared_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias such that backward sums their gradients over the replicas."""
        if self.replicas is None or not torch.is_grad_enabled():
            return self.weight, self.bias
        bias = None if self.bias is None else copy_to_tp_region(self.bias, self.replicas)
        return copy_to_tp_region(self.weight, self.replicas), bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features} of this rank"


class ColumnGroup:
    """Column layers with the same input (q, k and v; gate and up), which share one all-reduce of its gradient.

    The first member that is called computes the outputs of all. transformers calls q, k and v one by one with the same
    tensor, and no call says that they belong together. So the group keeps the outputs together with
    their input. A later call takes its output if its input is the same tensor object at the same version; a tensor that
    was changed in place has a new version and is computed anew. The group keeps nothing once every member has taken its
    output.
    """

    def __init__(self, ranks: Ranks, weight_grads: WeightGradients, *, sums_input_grad: bool = True) -> None:
        """If `sums_input_grad` is off, the input's gradient stays a partial sum: the gather's backward sums it."""
        self._ranks, self._weight_grads, self._sums_input_grad = ranks, weight_grads, sums_input_grad
        self.members: list[ColumnParallelLinear] = []
        self._input: Tensor | None = None
        self._version = 0
        self._outputs: dict[ColumnParallelLinear, Tensor] = {}
        self._gathered: tuple[Tensor, Tensor] | None = None

    def expect(self, whole: Tensor, part: Tensor) -> None:
        """Announce the next input `whole`, gathered from each rank's `part`: the layers then save only `part`."""
        self._gathered = whole, part

    def output_of(self, member: ColumnParallelLinear, x: Tensor) -> Tensor:
        """Return `member`'s output for `x`, computing the whole group if `x` is a new input."""
        version = 0 if x.is_inference() else x._version  # inference tensors have no version
        if x is not self._input or version != self._version or member not in self._outputs:
            gathered, self._gathered = self._gathered, None
            part = gathered[1] if gathered is not None and gathered[0] is x else None
            weights, biases = zip(*(m.shared_parameters() for m in self.members), strict=True)
            outputs = column_linears(
                x, weights, biases, self._ranks, self._weight_grads, part, sums_input_grad=self._sums_input_grad
            )
            self._input, self._version, self._outputs = x, version, dict(zip(self.members, outputs, strict=True))
        output = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return output


def gather_for(groups: Sequence[ColumnGroup], sequence: SequenceShards, x: Tensor) -> Tensor:
    """Gather `x` [b, s / size, d_in], and announce the whole sequence [b, s, d_in] to `groups` as their next input.

    Other modules may use the result too.
    """
    whole = sequence.gather(x, partial=True)
    for group in groups:
        group.expect(whole, x)
    return whole


def column_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    ranks: Ranks,
    weight_grads: WeightGradients,
    part: Tensor | None = None,
    *,
    sums_input_grad: bool = True,
) -> tuple[Tensor, ...]:
    """Return y_i = x W_i^T + b_i for column layers with the same input; one collective sums its gradient.

    Args:
        x: [b, s, d_in], the same on all ranks.
        weights: this rank's shards, [d_i, d_in] each.
        biases: [d_i] or None each.
        ranks: the tensor parallel group.
        weight_grads: tells backward whether to defer the weights' gradients.
        part: this rank's part [b, s / size, d_in] of the sequence, if `x` was gathered from parts. Then `part` is saved
            for backward instead of `x`, and receives the gradient, summed by a reduce-scatter.
        sums_input_grad: all-reduce the gradient of `x`; otherwise it stays this rank's partial sum.
    """
    source, whole = (x, None) if part is None else (part, x.detach())
    outputs: tuple[Tensor, ...] = _ColumnLinears.apply(  # type: ignore[no-untyped-call]
        source, whole, ranks, weight_grads, sums_input_grad, len(weights), *weights, *biases
    )
    return outputs


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        whole: Tensor | None,
        ranks: Ranks,
        weight_grads: WeightGradients,
        sums_input_grad: bool,
        count: int,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.ranks, ctx.weight_grads, ctx.in_sequence = ranks, weight_grads, whole is not None
        ctx.sums_input_grad, ctx.edges = sums_input_grad, edges_of(parameters)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(source, *weights)
        x = source if whole is None else whole
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, *weights = saved(ctx)
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]  # [n, d_i]
        gathered = None
        if ctx.in_sequence and any(ctx.edges) and not ctx.weight_grads.deferring:
            # Start this before the sum, which would delay it on the same communication channel.
            gathered = ctx.ranks.start_gather(source)
        dx, pending = None, None
        if ctx.needs_input_grad[0]:
            dx, pending = _start_input_grad(ctx, source, weights, flat)
        found = ctx.weight_grads.compute_or_defer(
            ctx.edges, lambda: _weight_and_bias_grads(ctx.edges, _whole_input(ctx, source, gathered), flat)
        )
        if pending is not None:
            pending.wait()
        return dx, *[None] * 5, *found


def _start_input_grad(
    ctx: Any, source: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor, Pending | None]:
    """Return the gradient of `source`, which is valid once the pending collective, if any, is awaited."""
    dx: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is not None:
            dx = grad @ weight if dx is None else dx.addmm_(grad, weight)  # [n, d_in]
    shape = list(source.shape)
    shape[SEQUENCE] *= ctx.ranks.size if ctx.in_sequence else 1
    dx = source.new_zeros(shape) if dx is None else dx.view(shape)
    if ctx.in_sequence:
        shard, pending = ctx.ranks.start_scatter_sum(dx, SEQUENCE)
        return shard, pending
    return dx, ctx.ranks.start_sum(dx) if ctx.sums_input_grad else None


def _whole_input(ctx: Any, source: Tensor, gathered: tuple[Tensor, Pending] | None) -> Tensor:
    """Return the layers' input [b, s, d_in], from the gather in flight if one was started."""
    if gathered is not None:
        whole, pending = gathered
        pending.wait()
        return side_by_side(whole, SEQUENCE)
    return cast(Tensor, ctx.ranks.gather(source, SEQUENCE)) if ctx.in_sequence else source


def _weight_and_bias_grads(
    edges: Sequence[GradientEdge | None], x: Tensor, grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the weights' gradients, then the biases'; None where there is no edge or no output gradient."""
    rows, count = x.flatten(0, -2), len(grads)  # [n, d_in]
    dweights = [
        grad.t() @ rows if grad is not None and edge else None for edge, grad in zip(edges[:count], grads, strict=True)
    ]
    dbiases = [
        grad.sum(0) if grad is not None and edge else None for edge, grad in zip(edges[count:], grads, strict=True)
    ]
    return [*dweights, *dbiases]
