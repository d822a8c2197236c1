"""Conversations to tokens, with a chat template or as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from femto_sft.conversation import Conversation, Problem
from femto_sft.limits import Limited
from femto_sft.section import SFTSection, day_of
from femto_sft.spans import places_in
from femto_sft.template import Template
from femto_sft.templated import Marked, Prefixed
from femto_sft.tokenizer import PLAIN
from femto_sft.tokens import Tokens, from_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoder(Protocol):
    """Encodes conversations, many at a time."""

    how: str
    """How the assistant's tokens are found, for the log."""

    @property
    def notes(self) -> Mapping[str, int]:
        """What was done otherwise than the rows say, with the number of turns, so far."""

    @property
    def unread(self) -> Mapping[str, int]:
        """Further keys of turns that are not read, with the number of turns, so far."""

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        """Return each conversation's tokens, or the problem with it."""


def make_encoder(tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> Encoder:
    """Return a run's encoder, within limits: for plain text, a template with generation marks, or one without."""

    def make() -> Encoder:
        if section.template == PLAIN:
            return PlainText(tokenizer, section)
        template = Template(tokenizer, day_of(section))
        return Marked(tokenizer, template, section) if template.marked else Prefixed(tokenizer, template, section)

    return Limited(make, tokenizer, section)


class PlainText:
    """Encodes a prompt, its completion and EOS as plain text; BOS comes first if the tokenizer adds it to texts."""

    how = "no template: the completion and EOS are the assistant's"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> None:
        self.notes: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self._tokenizer, self._all = tokenizer, section.train_on == "all"
        bos, first = tokenizer.bos_token_id, tokenizer("a")["input_ids"][:1]
        self._start = [bos] if bos is not None and first == [bos] else []

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        return [self._encode(conversation) for conversation in conversations]

    def _encode(self, conversation: Conversation) -> Tokens | Problem:
        if len(conversation.turns) != 2 or [turn["role"] for turn in conversation.turns] != ["user", "assistant"]:
            return Problem("sft.template = 'none' cannot write turns; it takes one prompt and one completion")
        more = [key for turn in conversation.turns for key in turn if key not in ("role", "content")]
        if more := [*more, *(["tools"] if conversation.tools else [])]:
            return Problem(f"sft.template = 'none' cannot write {more[0]!r}; it takes texts only")
        prompt, completion = (turn["content"] for turn in conversation.turns)
        # Tokenised alone, a completion could begin with a space that the text does not have.
        found = self._tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
        ids = [*self._start, *found["input_ids"], int(self._tokenizer.eos_token_id)]
        [(first, _)] = places_in(found["offset_mapping"], [(len(prompt), len(prompt + completion))])
        start = len(self._start) + first
        turns = [(0, start), (start, len(ids))]
        left_out = [turns[i] for i in conversation.left_out]
        return from_spans(ids, turns[1:], train_all=self._all, left_out=left_out, ends=ids[-1:])
