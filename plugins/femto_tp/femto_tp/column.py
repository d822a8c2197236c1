"""ColumnParallelLinear: W [d_out, d_in] cut on its output dimension.

Forward y_k = x W_k^T + b_k, no communication. Backward: dW_k = dy_k^T x and db_k are local; dx = sum over k of dy_k W_k
is a partial sum on each rank, and is summed by all-reduce while the weights' gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from femto_ops.deferral import WeightGradients, edges_of
from femto_tp.ranks import Ranks, saved, side_by_side
from femto_tp.regions import copy_to_tp_region
from femto_tp.sequence import SEQUENCE, Sequence


class ColumnParallelLinear(nn.Module):
    """A linear layer of which this rank holds some outputs; see `ColumnGroup` for what shares an input."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: ColumnGroup, copies: Ranks | None = None
    ) -> None:
        """`weight` [outputs of this rank, d_in] and `bias` [outputs of this rank] are this rank's part.

        `copies` are the ranks that hold this same part, if several do: their gradients are summed.
        """
        super().__init__()
        self.weight, self.bias, self.copies = weight, bias, copies
        self.out_features, self.in_features = weight.shape
        self.group = group
        group.members.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, d_in] (a part of s under sequence parallelism) -> [b, s, outputs of this rank]."""
        return self.group.output_of(self, x)

    def shared_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias, whose gradients will be the sums over all copies."""
        if self.copies is None or not torch.is_grad_enabled():
            return self.weight, self.bias
        bias = None if self.bias is None else copy_to_tp_region(self.bias, self.copies)
        return copy_to_tp_region(self.weight, self.copies), bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features} of this rank"


class ColumnGroup:
    """Column layers that see the same input (q, k and v; gate and up) share one all-reduce of its gradient.

    The first that is called computes all of them; the others, called with the very same tensor, find their outputs.
    """

    def __init__(self, ranks: Ranks, later: WeightGradients, *, sums_input_grad: bool = True) -> None:
        """Without `sums_input_grad` the input's gradient stays a partial sum, which whoever gathered the input sums."""
        self._ranks, self._later, self._sums_input_grad = ranks, later, sums_input_grad
        self.members: list[ColumnParallelLinear] = []
        self._input: Tensor | None = None
        self._version = 0
        self._outputs: dict[ColumnParallelLinear, Tensor] = {}
        self._gathered: tuple[Tensor, Tensor] | None = None

    def expect(self, whole: Tensor, part: Tensor) -> None:
        """The layers' input to come is `whole`, gathered from parts: called with it, they save only the part."""
        self._gathered = whole, part

    def output_of(self, member: ColumnParallelLinear, x: Tensor) -> Tensor:
        version = 0 if x.is_inference() else x._version  # changed in place, it is another input
        if x is not self._input or version != self._version or member not in self._outputs:
            gathered, self._gathered = self._gathered, None
            part = gathered[1] if gathered is not None and gathered[0] is x else None
            weights, biases = zip(*(m.shared_parameters() for m in self.members), strict=True)
            outputs = column_linears(
                x, weights, biases, self._ranks, self._later, part, sums_input_grad=self._sums_input_grad
            )
            self._input, self._version, self._outputs = x, version, dict(zip(self.members, outputs, strict=True))
        output = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return output


def gather_for(groups: SequenceOf[ColumnGroup], sequence: Sequence, x: Tensor) -> Tensor:
    """Return the whole sequence [b, s, d_in] of which `x` is this rank's part: the input to come of `groups`.

    Anybody else may use it too.
    """
    whole = sequence.gather(x, partial=True)
    for group in groups:
        group.expect(whole, x)
    return whole


def column_linears(
    x: Tensor,
    weights: SequenceOf[Tensor],
    biases: SequenceOf[Tensor | None],
    ranks: Ranks,
    later: WeightGradients,
    part: Tensor | None = None,
    *,
    sums_input_grad: bool = True,
) -> tuple[Tensor, ...]:
    """Return y_i = x W_i^T + b_i for column layers of one input, which share one sum of its gradient.

    Args:
        x: [b, s, d_in], alike on all ranks.
        weights: [d_i, d_in] each, this rank's part.
        biases: [d_i] or None each.
        ranks: the tensor parallel group.
        later: is asked in backward whether to put off the weights' gradients.
        part: the part [b, s / size, d_in] of the sequence from which `x` was gathered; it is saved for backward in the
            place of `x`, and receives the gradient.
        sums_input_grad: all-reduce the gradient of `x`; otherwise it stays this rank's partial sum. That of a `part` is
            whole in any case.
    """
    source, whole = (x, None) if part is None else (part, x.detach())
    outputs: tuple[Tensor, ...] = _ColumnLinears.apply(  # type: ignore[no-untyped-call]
        source, whole, ranks, later, sums_input_grad, len(weights), *weights, *biases
    )
    return outputs


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        whole: Tensor | None,
        ranks: Ranks,
        later: WeightGradients,
        sums_input_grad: bool,
        count: int,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.ranks, ctx.later, ctx.in_sequence = ranks, later, whole is not None
        ctx.sums_input_grad, ctx.edges = sums_input_grad, edges_of(parameters)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(source, *weights)
        x = source if whole is None else whole
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, *weights = saved(ctx)
        ranks: Ranks = ctx.ranks
        flat = [None if grad is None else grad.flatten(0, -2) for grad in grads]  # [n, d_i]
        dx, arrival, gathered = None, None, None
        if ctx.in_sequence and any(ctx.edges) and not ctx.later.are_put_off:
            gathered = ranks.start_gather(source)  # before the sum, which would hold it up: both go through one channel
        if ctx.needs_input_grad[0]:
            for grad, weight in zip(flat, weights, strict=True):
                if grad is not None:
                    dx = grad @ weight if dx is None else dx.addmm_(grad, weight)  # [n, d_in]
            shape = list(source.shape)
            shape[SEQUENCE] *= ranks.size if ctx.in_sequence else 1
            dx = source.new_zeros(shape) if dx is None else dx.view(shape)
            if ctx.in_sequence:
                dx, arrival = ranks.start_scatter_sum(dx, SEQUENCE)
            elif ctx.sums_input_grad:
                arrival = ranks.start_sum(dx)

        def weight_grads() -> list[Tensor | None]:
            x = source
            if gathered is not None:
                gathered[1].wait()
                x = side_by_side(gathered[0], SEQUENCE)
            elif ctx.in_sequence:
                x = ranks.gather(source, SEQUENCE)
            rows = x.flatten(0, -2)  # [n, d_in]
            pairs = list(zip(ctx.edges, [*flat, *flat], strict=True))
            count = len(flat)
            return [
                *(grad.t() @ rows if grad is not None and edge else None for edge, grad in pairs[:count]),
                *(grad.sum(0) if grad is not None and edge else None for edge, grad in pairs[count:]),
            ]

        found = ctx.later.now_or_later(ctx.edges, weight_grads)
        if arrival is not None:
            arrival.wait()
        return dx, *[None] * 5, *found
