"""The slice of the vocabulary that a tensor parallel rank holds."""

from __future__ import annotations

import attrs
from torch import Tensor

from femto_ops.vocab_slice import VocabSlice
from femto_tp.ranks import Ranks


@attrs.frozen
class RankSlice(VocabSlice):
    """The rows of the head's weight that one rank holds, and what it exchanges with the others."""

    ranks: Ranks
    sums_input_grad: bool
    """Whether backward all-reduces the gradient of the head's input; otherwise it stays this rank's partial sum."""

    def gather(self, numbers: Tensor) -> Tensor:
        everyone, pending = self.ranks.start_gather(numbers)
        pending.wait()
        return everyone

    def sum_input_grad(self, dhidden: Tensor) -> Tensor:
        return self.ranks.sum(dhidden) if self.sums_input_grad else dhidden
