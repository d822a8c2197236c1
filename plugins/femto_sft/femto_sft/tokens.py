"""A tokenised conversation with a mask of the trained tokens, and the ways to cut it to a row's length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from femto_sft.spans import Span


@attrs.frozen(eq=False)
class Tokens:
    """The tokens of a conversation, or of a piece of it."""

    ids: npt.NDArray[np.int32]
    """[tokens]."""
    trained: npt.NDArray[np.bool_]
    """Whether each token is trained, as the target of the place before it [tokens]."""
    answers: tuple[int, ...] = ()
    """The place after each of the assistant's turns."""
    ends: frozenset[int] = frozenset()
    """Ids of the tokens that end its trained turns."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learnable(self) -> int:
        """Number of targets. The first token is never a target."""
        return int(np.count_nonzero(self.trained[1:]))

    def part(self, start: int, stop: int) -> Tokens:
        """Return the tokens in [start, stop) as a document of its own."""
        return Tokens(self.ids[start:stop], self.trained[start:stop])


def from_spans(
    ids: Sequence[int],
    spans: Sequence[Span],
    *,
    train_all: bool,
    left_out: Sequence[Span] = (),
    ends: Collection[int] = (),
) -> Tokens:
    """Return the tokens `ids`, of which those in `spans`, or all with `train_all`, but not in `left_out` are trained.

    `spans` are the assistant's turns, and `ends` the tokens that may end one.
    """
    trained = np.full(len(ids), train_all)
    for start, stop in spans:
        trained[start:stop] = True
    for start, stop in left_out:
        trained[start:stop] = False
    last = [ids[stop - 1] for _, stop in spans if stop and trained[stop - 1]]
    return Tokens(
        np.asarray(ids, np.int32), trained, tuple(stop for _, stop in spans), frozenset(i for i in last if i in ends)
    )


def fit(tokens: Tokens, length: int, policy: Literal["drop", "truncate", "split"]) -> list[Tokens]:
    """Return the pieces of at most `length` tokens that are kept of a conversation, none if it is dropped.

    truncate keeps the tokens up to the end of the last assistant turn that fits. split makes pieces of up to `length`
    tokens; each begins with the last token of the piece before, so that every trained token stays a target.
    """
    if len(tokens) <= length:
        return [tokens]
    if policy == "truncate":
        end = max((end for end in tokens.answers if end <= length), default=0)
        return [tokens.part(0, end)] if end else []
    if policy == "split" and length > 1:
        return [tokens.part(start, start + length) for start in range(0, len(tokens) - 1, length - 1)]
    return []
