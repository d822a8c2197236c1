"""The four autograd operators at the borders of a tensor parallel region (Shoeybi et al. 2019, section 3, f and g).

| operator | forward | backward |
|---|---|---|
| `copy_to_tp_region` | identity | all-reduce |
| `reduce_from_tp_region` | all-reduce | identity |
| `gather_from_tp_region` | all-gather | split |
| `scatter_to_tp_region` | split | all-gather |

Each is the adjoint of another, where a tensor outside the region is one that all ranks hold alike.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femto_tp.ranks import Ranks


def copy_to_tp_region(x: Tensor, ranks: Ranks) -> Tensor:
    """Return `x` [...]; its gradient is the sum of the ranks' gradients. Stands before a column layer."""
    return cast(Tensor, CopyToTPRegion.apply(x, ranks))  # type: ignore[no-untyped-call]


def reduce_from_tp_region(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of the ranks' `x` [...]. Stands after a row layer."""
    return cast(Tensor, ReduceFromTPRegion.apply(x, ranks))  # type: ignore[no-untyped-call]


def gather_from_tp_region(x: Tensor, ranks: Ranks, dim: int = -1) -> Tensor:
    """Return the ranks' `x` [..., n], of one shape, side by side [..., size * n].

    Stands after a column layer whose output is not a row layer's input.
    """
    return cast(Tensor, GatherFromTPRegion.apply(x, ranks, dim % x.dim()))  # type: ignore[no-untyped-call]


def scatter_to_tp_region(x: Tensor, ranks: Ranks, dim: int = -1) -> Tensor:
    """Return this rank's equal part of `x` along `dim`. Stands before a row layer with a whole input.

    Raises ValueError where the ranks do not divide that dimension.
    """
    if x.shape[dim] % ranks.size:
        raise ValueError(f"{x.shape[dim]} places do not divide into {ranks.size} equal parts")
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
        if grad is None:  # put off, on all ranks alike
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
    """All-gather; split backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.gather(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.part(grad, ctx.dim).contiguous(), None, None


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
