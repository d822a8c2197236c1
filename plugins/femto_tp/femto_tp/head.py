"""VocabParallelHead: the matrix [v, h] from hidden states to logits, cut on the vocabulary like the embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femto_tp.ranks import Ranks
from femto_tp.regions import copy_to_tp_region, gather_from_tp_region


class VocabParallelHead(nn.Module):
    """A head of which this rank holds the rows from `start` on, of `vocab` in all."""

    def __init__(
        self,
        weight: nn.Parameter,
        start: int,
        vocab: int,
        ranks: Ranks,
        *,
        sums_input_grad: bool,
    ) -> None:
        """`weight` [rows of this rank, h]. Without `sums_input_grad` the input's gradient stays a partial sum, which
        whoever gathered the input sums."""
        super().__init__()
        self.weight, self.start, self.vocab, self.ranks = weight, start, vocab, ranks
        self.sums_input_grad = sums_input_grad

    def forward(self, hidden: Tensor, then: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
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
