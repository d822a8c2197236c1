"""The loss seat: hidden states and head in, a sum out."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import nn

from femto_core.batch import IGNORE_INDEX
from femto_ops.cross_entropy import linear_cross_entropy


class Loss(Protocol):
    """A loss as a sum over targets, so that any split into micro-batches and ranks adds up to the same number."""

    def __call__(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss (scalar, fp32 or wider) of `hidden` [b, s, h] against `targets` [b, s].

        Targets equal to `IGNORE_INDEX` count nothing. Equal on all ranks that hold the same rows.
        """


class CrossEntropy:
    """Next-token cross-entropy, a few rows of logits at a time."""

    def __call__(self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor) -> torch.Tensor:
        reduce = partial(self._sum, targets=targets.flatten())
        result: torch.Tensor = head(hidden.flatten(0, -2), reduce)
        return result

    @staticmethod
    def _sum(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE_INDEX)
