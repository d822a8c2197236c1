"""The tokens with which a chat template ends the assistant's turns, found by rendering two answers that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from femto_sft.conversation import Turn
from femto_sft.template import REFUSALS, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION = {"role": "user", "content": "a"}


def end_tokens(tokenizer: PreTrainedTokenizerBase, template: Template) -> frozenset[int]:
    """Return the ids of the added tokens that the template writes after an answer, the last one or an earlier one.

    They need be neither special nor EOS. A token that begins a turn ends none.
    """
    last = _equal_ends(tokenizer, template, *([_QUESTION, {"role": "assistant", "content": text}] for text in "bc"))
    earlier = _equal_ends(
        tokenizer, template, *([_QUESTION, {"role": "assistant", "content": text}, _QUESTION] for text in "bc")
    )
    asked = _equal_ends(tokenizer, template, *([{"role": "user", "content": text}] for text in "bc"), at_start=True)
    added = tokenizer.added_tokens_decoder
    first = [token for token in earlier if token in added and token not in asked][:1]
    return frozenset(token for token in (*last, *first) if token in added)


def _equal_ends(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    one: Sequence[Turn],
    other: Sequence[Turn],
    *,
    at_start: bool = False,
) -> list[int]:
    """Return the tokens with which both texts end (begin, with `at_start`), none where the template refuses them."""
    try:
        texts = [template.render(turns).text for turns in (one, other)]
    except REFUSALS:
        return []
    first, second = (ids if at_start else ids[::-1] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    equal = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return list(first[:equal] if at_start else first[:equal][::-1])
