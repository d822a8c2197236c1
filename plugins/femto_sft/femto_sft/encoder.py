"""Conversations to tokens, with a chat template or as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jinja2

from femto_sft.conversation import Conversation, Problem, Turn
from femto_sft.limits import Limited
from femto_sft.section import SFTSection
from femto_sft.spans import OTHERWISE, Span, span_between, spans_of_mask
from femto_sft.tokenizer import PLAIN, special_ids
from femto_sft.tokens import Tokens, from_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same pattern as in transformers
_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""Errors that a template's code raises for turns it does not support."""


class Encoder(Protocol):
    """Encodes conversations, many at a time."""

    how: str
    """How the assistant's tokens are found, for the log."""

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        """Return each conversation's tokens, or the problem with it."""


def make_encoder(tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> Encoder:
    """Return a run's encoder, within limits: for plain text, a template with generation marks, or one without."""
    if section.template == PLAIN:
        return Limited(lambda: PlainText(tokenizer, section), tokenizer, section)
    marked = _MARK.search(str(tokenizer.get_chat_template())) is not None
    kind = Marked if marked else Prefixed
    return Limited(lambda: kind(tokenizer, section), tokenizer, section)


class PlainText:
    """Encodes a prompt, its completion and EOS as plain text; BOS comes first if the tokenizer adds it to texts."""

    how = "no template: the completion and EOS are the assistant's"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> None:
        self._tokenizer, self._all = tokenizer, section.train_on == "all"
        bos, first = tokenizer.bos_token_id, tokenizer("a")["input_ids"][:1]
        self._start = [bos] if bos is not None and first == [bos] else []

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        return [self._encode(conversation) for conversation in conversations]

    def _encode(self, conversation: Conversation) -> Tokens | Problem:
        if len(conversation.turns) != 2 or [turn["role"] for turn in conversation.turns] != ["user", "assistant"]:
            return Problem("sft.template = 'none' cannot write turns; it takes one prompt and one completion")
        prompt, completion = (
            self._tokenizer(turn["content"], add_special_tokens=False)["input_ids"] for turn in conversation.turns
        )
        start = [*self._start, *prompt]
        ids = [*start, *completion, self._tokenizer.eos_token_id]
        return from_spans(ids, [(len(start), len(ids))], train_all=self._all)


class _Templated:
    """Common base of the two encoders with a template."""

    how: str

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> None:
        self._tokenizer, self._train_on = tokenizer, section.train_on
        # If all text is trained, the ends of turns matter for truncation only.
        self._needs_turns = section.train_on != "all" or section.overlong == "truncate"
        self._special = special_ids(tokenizer)

    def _render(self, turns: Sequence[Turn], conversation: Conversation, *, prompt: bool = False) -> str:
        # The template writes BOS, so `_tokenize` adds no special tokens.
        text: Any = self._tokenizer.apply_chat_template(
            [dict(turn) for turn in turns],
            tools=list(conversation.tools) if conversation.tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
        )
        return str(text)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _finish(self, ids: list[int], spans: list[Span]) -> Tokens:
        """Return the tokens. If the last answer, or the text, ends without a special token, EOS is added."""
        train_all = self._train_on == "all"
        end = spans[-1][1] if spans else len(ids)
        last = end
        while last > 0 and train_all and self._is_blank(ids[last - 1 : last]):
            last -= 1
        if last and (spans or train_all) and ids[last - 1] not in self._special and self._is_blank(ids[end:]):
            ids = [*ids[:end], int(self._tokenizer.eos_token_id)]
            spans = [*spans[:-1], (spans[-1][0], len(ids))] if spans else []
        return from_spans(ids, spans, train_all=train_all)

    def _is_blank(self, ids: Sequence[int]) -> bool:
        return not any(i in self._special for i in ids) and not str(self._tokenizer.decode(list(ids))).strip()

    def _wanted(self, conversation: Conversation) -> list[int]:
        answers = conversation.answers if self._needs_turns else []
        return answers[-1:] if self._train_on == "last" else answers


class Prefixed(_Templated):
    """Encodes with a template without marks: renders the text before and after each answer, and compares ids."""

    how = "assistant's tokens found by comparing rendered prefixes"

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        texts: list[str] = []
        rendered: list[list[int] | Problem] = []  # indices into `texts` for each conversation
        for conversation in conversations:
            try:
                if 0 in self._wanted(conversation):
                    rendered.append(Problem(f"it begins with the assistant, {OTHERWISE}"))
                    continue
                more = self._texts(conversation)
                rendered.append(list(range(len(texts), len(texts) + len(more))))
                texts += more
            except _REFUSALS as error:
                rendered.append(_refused(error))
        ids = self._tokenize(texts)
        return [
            found if isinstance(found, Problem) else self._put_together(conversation, [ids[i] for i in found])
            for conversation, found in zip(conversations, rendered, strict=True)
        ]

    def _texts(self, conversation: Conversation) -> list[str]:
        """Return the text of the whole conversation, then for each wanted answer the text before and after it."""
        turns = conversation.turns
        texts = [self._render(turns, conversation)]
        for i in self._wanted(conversation):
            texts.append(self._render(turns[:i], conversation, prompt=True))
            texts.append(texts[0] if i + 1 == len(turns) else self._render(turns[: i + 1], conversation))
        return texts

    def _put_together(self, conversation: Conversation, ids: list[list[int]]) -> Tokens | Problem:
        whole, pairs = ids[0], zip(ids[1::2], ids[2::2], strict=True)
        spans: list[Span] = []
        for i, (before, after) in zip(self._wanted(conversation), pairs, strict=True):
            span = span_between(whole, before, after, i + 1)
            if isinstance(span, Problem):
                if self._train_on != "all":
                    return span
                continue  # all text is trained; only truncation needs the end of the turn
            spans.append(self._without_tail(whole, span))
        return self._finish(whole, spans)

    def _without_tail(self, ids: list[int], span: Span) -> Span:
        """Remove white space after the end-of-turn token from a span, since generation stops before it."""
        start, stop = span
        last = next((i for i in range(stop - 1, start - 1, -1) if ids[i] in self._special), None)
        return (start, last + 1) if last is not None and self._is_blank(ids[last + 1 : stop]) else span


class Marked(_Templated):
    """Encodes with a template that marks the assistant's text with {% generation %}."""

    how = "assistant's tokens found by the template's generation marks"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> None:
        super().__init__(tokenizer, section)
        self._ends = {int(tokenizer.eos_token_id)}
        probe: tuple[Turn, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        try:
            ids, spans = self._read(probe, Conversation(probe))
        except _REFUSALS:  # the template does not support this probe
            return
        if spans and spans[-1][1] < len(ids) and ids[spans[-1][1]] in self._special:
            self._ends.add(ids[spans[-1][1]])

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        return [self._try(conversation) for conversation in conversations]

    def _try(self, conversation: Conversation) -> Tokens | Problem:
        try:
            return self._encode(conversation)
        except _REFUSALS as error:
            return _refused(error)

    def _encode(self, conversation: Conversation) -> Tokens | Problem:
        ids, spans = self._read(conversation.turns, conversation)
        said = any(turn["content"].strip() for turn in conversation.turns if turn["role"] == "assistant")
        if said and not spans and self._train_on != "all":
            return Problem("the template's generation marks are empty, though the assistant speaks")
        first = self._wanted(conversation)[:1]
        if first and first[0] > 0 and any(turn["role"] == "assistant" for turn in conversation.turns[: first[0]]):
            _, earlier = self._read(conversation.turns[: first[0]], conversation)
            spans = spans[len(earlier) :]
        elif not first:
            spans = []
        return self._finish(ids, [self._with_end(ids, span) for span in spans])

    def _read(self, turns: Sequence[Turn], conversation: Conversation) -> tuple[list[int], list[Span]]:
        found: Any = self._tokenizer.apply_chat_template(
            [dict(turn) for turn in turns],
            tools=list(conversation.tools) if conversation.tools else None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return list(found["input_ids"]), spans_of_mask(found["assistant_masks"])

    def _with_end(self, ids: list[int], span: Span) -> Span:
        """Extend a span by the end-of-turn token after it, if the marks leave that token out."""
        start, stop = span
        return (start, stop + 1) if stop < len(ids) and ids[stop] in self._ends else span


def _refused(error: Exception) -> Problem:
    return Problem(f"the chat template cannot render it ({' '.join(str(error).split()) or type(error).__name__})")
