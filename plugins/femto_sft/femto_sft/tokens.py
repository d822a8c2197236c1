"""A conversation as tokens, each with whether it is trained; and what becomes of one that is longer than a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from femto_sft.spans import Span


@attrs.frozen(eq=False)
class Tokens:
    """One conversation, or a piece of one."""

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    """Whether the token at a place is to be learnt (as the target of the place before it)."""
    answers: tuple[int, ...] = ()
    """Ends of the assistant's turns."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learnable(self) -> int:
        """How many targets there are: the first token is nobody's."""
        return int(np.count_nonzero(self.trained[1:]))

    def part(self, start: int, stop: int) -> Tokens:
        """Return the tokens from `start` to before `stop`, as a document of its own."""
        return Tokens(self.ids[start:stop], self.trained[start:stop])


def from_spans(ids: Sequence[int], spans: Sequence[Span], *, train_all: bool) -> Tokens:
    """Return `ids` of which those in `spans` are trained, or all."""
    trained = np.full(len(ids), train_all)
    for start, stop in spans:
        trained[start:stop] = True
    return Tokens(np.asarray(ids, np.int32), trained, tuple(stop for _, stop in spans))


def fit(tokens: Tokens, length: int, policy: Literal["drop", "truncate", "split"]) -> list[Tokens]:
    """Return what is kept of a conversation that may have more than `length` tokens; nothing of one that is dropped.

    truncate: up to the end of the last of the assistant's turns that fits. split: pieces of up to `length` tokens; a
    piece begins with the last token of the one before, so that every trained token stays a target.
    """
    if len(tokens) <= length:
        return [tokens]
    if policy == "truncate":
        end = max((end for end in tokens.answers if end <= length), default=0)
        return [tokens.part(0, end)] if end else []
    if policy == "split" and length > 1:
        return [tokens.part(start, start + length) for start in range(0, len(tokens) - 1, length - 1)]
    return []
