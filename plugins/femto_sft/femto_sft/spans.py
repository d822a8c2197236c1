"""Finding the assistant's tokens: by the template's generation marks, or by rendering prefixes.

The text is never searched. A template with {% generation %} marks says where the assistant speaks. With any other
template, the turns before an answer are rendered with the generation prompt, and again with the answer. Both must be
prefixes, token by token, of the whole conversation; the answer is between their ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from femto_sft.conversation import Problem

Span = tuple[int, int]
"""Place of the first token, and the place after the last."""

OTHERWISE = "so the assistant's tokens cannot be found; give a template with {% generation %} marks (sft.template)"


def places_in(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return the span of tokens that overlap each span of characters; it is empty where none does.

    `offsets` has each token's characters. Both are in order.
    """
    found, token = [], 0
    for start, stop in spans:
        while token < len(offsets) and offsets[token][1] <= start:
            token += 1
        first = token
        while token < len(offsets) and offsets[token][0] < stop:
            token += 1
        found.append((first, token))
    return found


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
