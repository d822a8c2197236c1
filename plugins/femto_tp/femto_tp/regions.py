"""The four autograd operators at the borders of a tensor parallel region (Shoeybi et al. 2019, section 3, f and g).

| operator | forward | backward |
|---|---|---|
| `copy_to_tp_region` | identity | all-reduce |
| `reduce_from_tp_region` | all-reduce | identity |
| `gather_from_tp_region` | all-gather | split, or reduce-scatter of partial sums |
| `scatter_to_tp_region` | split | all-gather |

A tensor outside the region is the same on all ranks. For such tensors, the backward of each operator is the forward of
another.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femto_tp.ranks import Ranks


def copy_to_tp_region(x: Tensor, ranks: Ranks) -> Tensor:
    """Return `x` [...]; backward sums the ranks' gradients. Used before a column layer."""
    return cast(Tensor, CopyToTPRegion.apply(x, ranks))  # type: ignore[no-untyped-call]


def reduce_from_tp_region(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of the ranks' `x` [...]. Used after a row layer."""
    return cast(Tensor, ReduceFromTPRegion.apply(x, ranks))  # type: ignore[no-untyped-call]


def gather_from_tp_region(x: Tensor, ranks: Ranks, dim: int = -1, *, partial: bool = False) -> Tensor:
    """Return the ranks' `x` [..., n], of equal shapes, concatenated along `dim`: [..., size * n].

    Used after a column layer whose output is not a row layer's input, and to unshard a sequence. `partial`: each rank's
    gradient of the result is a partial sum, so backward reduce-scatters; otherwise it is whole, and backward slices it.
    """
    return cast(Tensor, GatherFromTPRegion.apply(x, ranks, dim % x.dim(), partial))  # type: ignore[no-untyped-call]


def scatter_to_tp_region(x: Tensor, ranks: Ranks, dim: int = -1) -> Tensor:
    """Return this rank's equal part of `x` along `dim`. Used before a row layer whose input is whole.

    Raises ValueError if the number of ranks does not divide that dimension.
    """
    if x.shape[dim] % ranks.size:
        raise ValueError(f"a dimension of {x.shape[dim]} does not divide into {ranks.size} equal parts")
    return cast(Tensor, ScatterToTPRegion.apply(x, ranks, dim % x.dim()))  # type: ignore[no-untyped-call]


class CopyToTPRegion(torch.autograd.Function):
    """Identity; all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:  # deferred, on all ranks
            return None, None
        return ctx.ranks.sum(grad.clone(memory_format=torch.contiguous_format)), None


class ReduceFromTPRegion(torch.autograd.Function):
    """All-reduce; identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class GatherFromTPRegion(torch.autograd.Function):
    """All-gather; backward reduce-scatter (of partial sums) or split (of whole gradients)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, partial: bool) -> Tensor:
        ctx.ranks, ctx.dim, ctx.partial = ranks, dim, partial
        return ranks.gather(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks: Ranks = ctx.ranks
        dx = ranks.scatter_sum(grad, ctx.dim) if ctx.partial else ranks.part(grad, ctx.dim).contiguous()
        return dx, None, None, None


class ScatterToTPRegion(torch.autograd.Function):
    """Split; all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.part(x, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.gather(grad, ctx.dim), None, None
