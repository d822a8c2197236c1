"""Sequence parallelism: between tensor parallel regions, each rank holds an equal part of the sequence.

See Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2. The all-reduce after a row layer becomes a reduce-scatter
along the sequence there and an all-gather before the next column layer; likewise in backward.
"""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from femto_core.errors import UserError
from femto_tp.ranks import Ranks
from femto_tp.regions import gather_from_tp_region, scatter_to_tp_region

SEQUENCE = 1  # the dimension of [b, s, h]


@attrs.define
class SequenceShards:
    """Shards and unshards the sequence of the current forward pass.

    Without gradients, a length that the number of ranks does not divide is padded.
    """

    ranks: Ranks
    length: int = 0

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part [b, s / size, h] of `x` [b, s, h], which is the same on all ranks.

        Raises `UserError` if gradients are on and the number of ranks does not divide s.
        """
        self.length = x.shape[SEQUENCE]
        lacking = -self.length % self.ranks.size
        if lacking and torch.is_grad_enabled():
            raise UserError(
                f"--tp.sequence-parallel needs rows of a multiple of {self.ranks.size} tokens, and this batch has rows "
                f"of {self.length} tokens; set --data.seq-len to a multiple"
            )
        return scatter_to_tp_region(F.pad(x, (0, 0, 0, lacking)) if lacking else x, self.ranks, SEQUENCE)

    def gather(self, x: Tensor, *, partial: bool) -> Tensor:
        """Return the whole [b, s, h] from the ranks' parts; `partial`: each rank's gradient of it is a partial sum."""
        return self.cut(gather_from_tp_region(x, self.ranks, SEQUENCE, partial=partial))

    def cut(self, whole: Tensor) -> Tensor:
        """Drop the padding of a gathered sequence."""
        return whole if torch.is_grad_enabled() else whole[:, : self.length]

    def pad(self, whole: Tensor) -> Tensor:
        """Pad a sequence that will be scattered."""
        lacking = -whole.shape[SEQUENCE] % self.ranks.size
        return F.pad(whole, (0, 0, 0, lacking)) if lacking else whole
