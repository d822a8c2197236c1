"""Finding the assistant's tokens: by the template's generation marks, or by rendering prefixes.

The text is never searched. A template with {% generation %} marks says where the assistant speaks. With any other
template, the turns before an answer are rendered with the generation prompt, and again with the answer. Both must be
prefixes, token by token, of the whole conversation; the answer is between their ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from femto_sft.conversation import Problem

Span = tuple[int, int]
"""Place of the first token, and the place after the last."""

OTHERWISE = "so the assistant's tokens cannot be found; give a template with {% generation %} marks (sft.template)"


def spans_of_mask(mask: Sequence[int]) -> list[Span]:
    """Return the spans of consecutive ones in `mask`."""
    ends = list(itertools.accumulate(len(list(run)) for _, run in itertools.groupby(mask)))
    starts = [0, *ends]
    return [(start, end) for start, end in zip(starts, ends, strict=False) if mask[start]]


def span_between(whole: Sequence[int], before: Sequence[int], after: Sequence[int], turn: int) -> Span | Problem:
    """Return the span of an answer: from the end of `before` to the end of `after`, two prefixes of `whole`.

    `before` ends with the generation prompt for turn number `turn`, `after` with that turn. Returns a `Problem` if
    either is no prefix of `whole`.
    """
    if list(whole[: len(before)]) != list(before):
        return Problem(
            f"the template renders the text before turn {turn} (the assistant's) differently once the answer "
            f"follows, {OTHERWISE}"
        )
    if list(whole[: len(after)]) != list(after):
        return Problem(
            f"the template renders turn {turn} (the assistant's) differently once others follow, {OTHERWISE}; to "
            "train only the last answer, set --sft.train-on last"
        )
    if len(after) <= len(before):
        return Problem(f"the template shows nothing of turn {turn} (the assistant's)")
    return len(before), len(after)
