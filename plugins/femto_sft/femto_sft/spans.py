"""Which tokens of a conversation are the assistant's: by the template's own marks, or by rendering prefixes.

Nothing is ever searched for. A template with {% generation %} marks says where the assistant speaks. Of any other, the
turns before an answer are rendered with the prompt for one, and again with the answer; both must be prefixes, token by
token, of the whole conversation, and what lies between their ends is the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from femto_sft.conversation import Problem

Span = tuple[int, int]
"""First token, and the one behind the last."""

OTHERWISE = "so what is the assistant's cannot be told; give a template with {% generation %} marks (sft.template)"


def spans_of_mask(mask: Sequence[int]) -> list[Span]:
    """Return the runs of ones in `mask`."""
    ends = list(itertools.accumulate(len(list(run)) for _, run in itertools.groupby(mask)))
    starts = [0, *ends]
    return [(start, end) for start, end in zip(starts, ends, strict=False) if mask[start]]


def span_between(whole: Sequence[int], before: Sequence[int], after: Sequence[int], turn: int) -> Span | Problem:
    """Return the tokens that `after` has and `before` has not, if both are prefixes of `whole`.

    `before` ends with the prompt for the answer that is turn number `turn`, `after` with the answer.
    """
    if list(whole[: len(before)]) != list(before):
        return Problem(
            f"the template renders what comes before turn {turn} (the assistant's) differently once the answer is "
            f"there, {OTHERWISE}"
        )
    if list(whole[: len(after)]) != list(after):
        return Problem(
            f"the template renders turn {turn} (the assistant's) differently once others follow, {OTHERWISE}; where "
            "only the last answer matters, --sft.train-on last"
        )
    if len(after) <= len(before):
        return Problem(f"the template shows nothing of turn {turn} (the assistant's)")
    return len(before), len(after)
