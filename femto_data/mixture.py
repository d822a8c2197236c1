"""Mixture weights: how often each document is written, so that each input has its share of the training tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from femto_core.errors import UserError


def check_weights(weights: Sequence[float], inputs: Sequence[str]) -> None:
    """Raise UserError unless there are no weights, or one positive weight for each input."""
    if weights and len(weights) != len(inputs):
        raise UserError(f"{len(weights)} weights for {len(inputs)} inputs; give one for each, in the same order")
    for weight, name in zip(weights, inputs, strict=False):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"weight {weight} of {name} must be above 0; leave out an input that should have no share")


def ratios(weights: Sequence[float], tokens: Sequence[int], names: Sequence[str]) -> list[float]:
    """Return how often, on average, each document of an input is written so that the inputs' shares are `weights`.

    `tokens` are the inputs' training tokens; their sum is kept. Without weights every ratio is 1.
    """
    if not weights:
        return [1.0] * len(tokens)
    for count, name in zip(tokens, names, strict=True):
        if not count:
            raise UserError(f"input {name} has no training tokens to give a weight; leave it out")
    whole, total = sum(weights), sum(tokens)
    return [weight / whole * total / count for weight, count in zip(weights, tokens, strict=True)]


@attrs.define
class Mixture:
    """Decides, document by document, how often to write each one.

    For each input, the tokens written are kept as close as possible to `ratio` times the tokens seen. So repeated and
    omitted documents are spread evenly over the input, and its total is off by at most half a document.
    """

    ratios: Sequence[float]
    _seen: list[int] = attrs.field(init=False)
    _taken: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seen = [0] * len(self.ratios)
        self._taken = [0] * len(self.ratios)

    @property
    def takes_all(self) -> bool:
        """Whether every document is written once."""
        return all(ratio == 1 for ratio in self.ratios)

    def anew(self) -> Mixture:
        """Return a mixture with the same ratios that has seen no document."""
        return Mixture(self.ratios)

    def take(self, source: int, tokens: int) -> int:
        """Return how often to write the next document of input `source`, which has `tokens` tokens."""
        self._seen[source] += tokens
        due = self.ratios[source] * self._seen[source] - self._taken[source]
        copies = max(0, math.floor(due / tokens + 0.5)) if tokens else 0
        self._taken[source] += copies * tokens
        return copies
