"""VocabParallelEmbedding: the table [v, h] sharded on the vocabulary (Shoeybi et al. 2019, section 3).

Forward: each rank looks up the ids in its shard and takes zeros for the others; an all-reduce sums the results.
Backward is local.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from femto_tp.ranks import Ranks
from femto_tp.regions import reduce_from_tp_region


class VocabParallelEmbedding(nn.Module):
    """An embedding of which this rank holds the rows `start` and after."""

    def __init__(self, weight: nn.Parameter, start: int, padding_idx: int | None, ranks: Ranks) -> None:
        """`weight` [rows of this rank, h]; `padding_idx` is the global id that gets no gradient, if any."""
        super().__init__()
        self.weight, self.start, self._ranks = weight, start, ranks
        is_here = padding_idx is not None and start <= padding_idx < start + weight.shape[0]
        self._padding = padding_idx - start if is_here and padding_idx is not None else None

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] -> [b, s, h], the same on all ranks."""
        rows = self.weight.shape[0]
        if rows:
            is_here = (ids >= self.start) & (ids < self.start + rows)
            local = (ids - self.start).where(is_here, 0)
            found = F.embedding(local, self.weight, self._padding) * is_here.unsqueeze(-1)
        else:  # this rank holds no rows: there are more ranks than tokens
            found = self.weight.sum() * torch.zeros(*ids.shape, self.weight.shape[1], device=ids.device).to(self.weight)
        return reduce_from_tp_region(found, self._ranks)

    def extra_repr(self) -> str:
        return f"rows {self.start} to {self.start + self.weight.shape[0]}"
