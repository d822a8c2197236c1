"""Statistics of target tokens with the head sharded on the vocabulary: summed cross-entropy, and per-token values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from femto_ops.token_log_probs import TokenLogProbs
from femto_tp.cross_entropy import vocab_parallel_cross_entropy
from femto_tp.head import VocabParallelHead
from femto_tp.log_probs import vocab_parallel_log_probs

T = TypeVar("T")


class VocabParallelStatistics:
    """Takes the seat of token statistics.

    Both statistics are computed inside the head's call, so that module hooks see its weight used.
    """

    def cross_entropy(
        self, hidden: Tensor, head: nn.Module, targets: Tensor, *, label_smoothing: float = 0.0
    ) -> Tensor:
        """Return the cross-entropy of `hidden` [.., h] against `targets` [..], summed over targets.

        Targets equal to `IGNORE_INDEX` are ignored. Hidden states, targets and the result are the same on all ranks.
        """
        then = partial(_sharded(vocab_parallel_cross_entropy, head, targets), label_smoothing=label_smoothing)
        result: Tensor = head(hidden.flatten(0, -2), then)
        return result

    def log_probs(
        self, hidden: Tensor, head: nn.Module, targets: Tensor, *, entropy: bool = False, top: int = 0
    ) -> TokenLogProbs:
        """Return the statistics of each of the n `targets` [..], from `hidden` [.., h], leading dimensions flattened.

        Targets equal to `IGNORE_INDEX` have statistics of 0. Hidden states, targets and the result are the same on all
        ranks.
        """
        then = partial(_sharded(vocab_parallel_log_probs, head, targets), entropy=entropy, top=top)
        result: TokenLogProbs = head(hidden.flatten(0, -2), then)
        return result


def _sharded(operation: Callable[..., T], head: nn.Module, targets: Tensor) -> Callable[..., T]:
    """Return the vocabulary-parallel `operation`, bound to the shard that `head` holds and to the flat `targets`."""
    assert isinstance(head, VocabParallelHead)
    return partial(
        operation,
        targets=targets.flatten(),
        start=head.start,
        vocab=head.vocab,
        ranks=head.ranks,
        sums_input_grad=head.sums_input_grad,
    )
