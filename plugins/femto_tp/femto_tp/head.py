"""VocabParallelHead: the matrix [v, h] from hidden states to logits, sharded on the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femto_tp.ranks import Ranks
from femto_tp.regions import copy_to_tp_region, gather_from_tp_region

T = TypeVar("T")


class VocabParallelHead(nn.Module):
    """A head of which this rank holds the rows `start` and after, of `vocab` in total."""

    def __init__(
        self,
        weight: nn.Parameter,
        start: int,
        vocab: int,
        ranks: Ranks,
        *,
        sums_input_grad: bool,
    ) -> None:
        """`weight` [rows of this rank, h].

        If `sums_input_grad` is off, the input's gradient stays a partial sum: the gather's backward sums it.
        """
        super().__init__()
        self.weight, self.start, self.vocab, self.ranks = weight, start, vocab, ranks
        self.sums_input_grad = sums_input_grad

    @overload
    def forward(self, hidden: Tensor, then: None = None) -> Tensor: ...
    @overload
    def forward(self, hidden: Tensor, then: Callable[[Tensor, Tensor], T]) -> T: ...
    def forward(self, hidden: Tensor, then: Callable[[Tensor, Tensor], T] | None = None) -> Tensor | T:
        """Return the whole logits [..., v] of `hidden` [..., h], or `then(hidden, weight)` with this rank's rows."""
        if then is not None:
            return then(hidden, self.weight)
        if self.sums_input_grad:
            hidden = copy_to_tp_region(hidden, self.ranks)
        logits = F.linear(hidden, self.weight)
        widest = -(-self.vocab // self.ranks.size)
        padded = F.pad(logits, (0, widest - logits.shape[-1]))
        whole = gather_from_tp_region(padded, self.ranks)
        parts = torch.split(whole, widest, dim=-1)
        return torch.cat([part[..., :rows] for part, rows in zip(parts, self._rows(), strict=True)], dim=-1)

    def _rows(self) -> list[int]:
        base, extra = divmod(self.vocab, self.ranks.size)
        return [base + (rank < extra) for rank in range(self.ranks.size)]
