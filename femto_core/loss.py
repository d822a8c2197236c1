"""The two seats of a loss: statistics of tokens under the head, and the task's loss, which sums them up."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import nn

from femto_core.batch import IGNORE_INDEX, Batch
from femto_ops.cross_entropy import linear_cross_entropy
from femto_ops.token_log_probs import TokenLogProbs, token_log_probs


class BatchLoss(Protocol):
    """A task loss with its statistics, as a schedule calls it."""

    def __call__(self, hidden: torch.Tensor, head: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss (scalar) of a micro-batch with final hidden states [b, s, h]."""


class TokenStatistics(Protocol):
    """Log-probabilities and related statistics of each target, in chunks: full logits never exist.

    Results are equal on all ranks that see the same tokens, and differentiable in the hidden states and in the head's
    weight. Targets equal to `IGNORE_INDEX` are left out.
    """

    def cross_entropy(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, *, label_smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the summed cross-entropy (scalar, fp32 or wider) of `hidden` [..., h] against `targets` [...].

        `label_smoothing` is the share of each target that is spread evenly over the vocabulary.
        """

    def log_probs(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, *, entropy: bool = False, top: int = 0
    ) -> TokenLogProbs:
        """Return the log-probability of each target, flattened to [n]; 0 for targets that are left out.

        On request also the `entropy` [n] in nats, and the `top` largest log-probabilities with their ids [n, top].
        """


class TaskLoss(Protocol):
    """The objective, as a sum: any split into micro-batches and ranks adds up to the same number.

    If a loss is no sum over tokens (but over pairs, or groups), its collator keeps each pair within a micro-batch.
    """

    def __call__(
        self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
    ) -> torch.Tensor:
        """Return the summed loss (scalar, fp32 or wider) of a micro-batch with final hidden states [b, s, h].

        The result must be equal on all ranks that see the same tokens. `batch` is on the device of `hidden`.
        """

    def weight(self, batch: Batch) -> float:
        """Return this micro-batch's part of the divisor of the step's loss, 0 or more; `batch` is on the CPU.

        Parts are summed over all micro-batches and over the mesh's data axes before the first backward.
        """


class ChunkedStatistics:
    """Statistics of a whole head, a few rows of logits at a time."""

    def cross_entropy(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, *, label_smoothing: float = 0.0
    ) -> torch.Tensor:
        compute = partial(
            linear_cross_entropy,
            targets=targets.flatten(),
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
        )
        result: torch.Tensor = head(hidden.flatten(0, -2), compute)
        return result

    def log_probs(
        self, hidden: torch.Tensor, head: nn.Module, targets: torch.Tensor, *, entropy: bool = False, top: int = 0
    ) -> TokenLogProbs:
        compute = partial(
            token_log_probs, targets=targets.flatten(), ignore_index=IGNORE_INDEX, entropy=entropy, top=top
        )
        result: TokenLogProbs = head(hidden.flatten(0, -2), compute)
        return result


class CrossEntropy:
    """Next-token cross-entropy, as a mean over the valid targets."""

    def __call__(
        self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
    ) -> torch.Tensor:
        return statistics.cross_entropy(hidden, head, batch.targets)

    def weight(self, batch: Batch) -> float:
        return batch.valid
