"""Sequence parallelism: between tensor parallel regions every rank holds its equal part of the sequence.

(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.) The all-reduce behind a row layer becomes a reduce-scatter
along the sequence, and the one in a column layer's backward another; all-gathers make up the rest.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from femto_core.errors import UserError
from femto_tp.ranks import Ranks
from femto_tp.regions import scatter_to_tp_region

SEQUENCE = 1  # the dimension of [b, s, h]


@attrs.define
class Sequence:
    """The sequence of the forward pass under way. Without gradients its length need not divide: it is padded."""

    ranks: Ranks
    length: int = 0

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part [b, s / size, h] of `x` [b, s, h], which all ranks hold alike.

        Raises `UserError` in training where the ranks do not divide s.
        """
        self.length = x.shape[SEQUENCE]
        lacking = -self.length % self.ranks.size
        if lacking and torch.is_grad_enabled():
            raise UserError(
                f"--tp.sequence-parallel cuts every row into {self.ranks.size} equal parts, which {self.length} tokens "
                "are not; set --data.seq-len to a multiple"
            )
        return scatter_to_tp_region(F.pad(x, (0, 0, 0, lacking)) if lacking else x, self.ranks, SEQUENCE)

    def gather(self, x: Tensor, *, partial: bool) -> Tensor:
        """Return the whole [b, s, h] of the ranks' parts. `partial`: its gradient will be a partial sum on a rank."""
        whole: Tensor = GatherSequence.apply(x, self.ranks, partial)  # type: ignore[no-untyped-call]
        return self.cut(whole)

    def cut(self, whole: Tensor) -> Tensor:
        """Drop the padding of a sequence that was gathered."""
        return whole if torch.is_grad_enabled() else whole[:, : self.length]

    def pad(self, whole: Tensor) -> Tensor:
        """Add padding to a sequence that is to be scattered."""
        lacking = -whole.shape[SEQUENCE] % self.ranks.size
        return F.pad(whole, (0, 0, 0, lacking)) if lacking else whole


class GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; backward reduce-scatter (of partial sums) or split (of whole ones)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, partial: bool) -> Tensor:
        ctx.ranks, ctx.partial = ranks, partial
        return ranks.gather(x, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ranks = cast(Ranks, ctx.ranks)
        if ctx.partial:
            return ranks.scatter_sum(grad, SEQUENCE), None, None
        return ranks.part(grad, SEQUENCE).contiguous(), None, None
