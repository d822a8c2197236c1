"""Encoders with a chat template: one for templates with generation marks, one for those without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from femto_sft.conversation import Conversation, Problem
from femto_sft.ends import end_tokens
from femto_sft.section import SFTSection
from femto_sft.shown import ShownParts
from femto_sft.spans import OTHERWISE, Span, places_in, span_between
from femto_sft.template import REFUSALS, Rendered, Template, refused
from femto_sft.tokenizer import special_ids
from femto_sft.tokens import Tokens, from_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@attrs.frozen
class _Text:
    """A rendered text and its tokens."""

    ids: list[int]
    encoding: Any
    """The tokenizers library's result, with each token's characters as `offsets`."""
    marks: tuple[Span, ...] = ()


class _Templated:
    """Common base of the two encoders with a template."""

    how: str

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template, section: SFTSection) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._train_all, self._only_last = section.train_on == "all", section.train_on == "last"
        # If all text is trained, the ends of turns matter for truncation only.
        self._needs_turns = not self._train_all or section.overlong == "truncate"
        self._shown = ShownParts(template)
        self._written = end_tokens(tokenizer, template)
        self._ends = special_ids(tokenizer) | self._written

    @property
    def notes(self) -> Mapping[str, int]:
        return self._shown.notes

    @property
    def unread(self) -> Mapping[str, int]:
        return self._shown.unread

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        plans: list[tuple[Conversation, list[Rendered]] | Problem] = [self._plan(one) for one in conversations]
        texts = iter(self._tokenize([one for plan in plans if not isinstance(plan, Problem) for one in plan[1]]))
        return [
            plan if isinstance(plan, Problem) else self._put_together(plan[0], [next(texts) for _ in plan[1]])
            for plan in plans
        ]

    def _plan(self, conversation: Conversation) -> tuple[Conversation, list[Rendered]] | Problem:
        """Return what of a conversation is tokenised: the whole text, then those that its turns are found with."""
        shown = self._shown.check(conversation)
        if isinstance(shown, Problem):
            return shown
        try:
            rendered = self._render(shown)
            return rendered if isinstance(rendered, Problem) else (shown, [*rendered, *self._around_left_out(shown)])
        except REFUSALS as error:
            return refused(error)

    def _render(self, conversation: Conversation) -> list[Rendered] | Problem:
        """Return the rendered conversation, then whatever else `_find` needs."""
        raise NotImplementedError

    def _find(self, conversation: Conversation, texts: list[_Text]) -> list[Span] | Problem:
        """Return the spans of the wanted answers; `texts` are those of `_render`."""
        raise NotImplementedError

    def _prefix(self, conversation: Conversation, turns: int, *, prompt: bool = False) -> Rendered:
        """Return the first `turns` turns of a conversation as text."""
        if not turns:
            return Rendered("", ())
        return self._template.render(conversation.turns[:turns], conversation.tools, prompt=prompt)

    def _around_left_out(self, conversation: Conversation) -> list[Rendered]:
        """Return the text before and after each turn that is left out where all text is trained."""
        turns = sorted(conversation.left_out) if self._train_all else []
        return [self._prefix(conversation, number) for i in turns for number in (i, i + 1)]

    def _put_together(self, conversation: Conversation, texts: list[_Text]) -> Tokens | Problem:
        turns = sorted(conversation.left_out) if self._train_all else []
        around, ids = texts[len(texts) - 2 * len(turns) :], texts[0].ids
        left_out = []
        for i, before, after in zip(turns, around[::2], around[1::2], strict=True):
            span = span_between(ids, before.ids, after.ids, i + 1)
            if isinstance(span, Problem):
                return Problem(
                    f"turn {i + 1} is not to be trained, but the template does not show where it begins and ends"
                )
            left_out.append(span)
        spans = self._find(conversation, texts)
        return spans if isinstance(spans, Problem) else self._finish(ids, spans, left_out)

    def _tokenize(self, texts: list[Rendered]) -> list[_Text]:
        if not texts:
            return []
        # The template writes BOS, so no special tokens are added.
        found = self._tokenizer([one.text for one in texts], add_special_tokens=False)
        parts = zip(found["input_ids"], found.encodings or (), texts, strict=True)
        return [_Text(ids, encoding, one.marks) for ids, encoding, one in parts]

    def _finish(self, ids: list[int], spans: list[Span], left_out: list[Span]) -> Tokens:
        """Return the tokens. If the last answer, or the text, ends without an end-of-turn token, EOS is added."""
        end = spans[-1][1] if spans else len(ids)
        last = end
        while last > 0 and self._train_all and self._is_blank(ids[last - 1 : last]):
            last -= 1
        if last and (spans or self._train_all) and ids[last - 1] not in self._ends and self._is_blank(ids[end:]):
            ids = [*ids[:end], int(self._tokenizer.eos_token_id)]
            last = len(ids)
            spans = [*spans[:-1], (spans[-1][0], last)] if spans else []
        tokens = from_spans(ids, spans, train_all=self._train_all, left_out=left_out, ends=self._ends)
        if self._train_all and not spans and last and tokens.trained[last - 1]:
            return attrs.evolve(tokens, ends=self._ends & {ids[last - 1]})
        return tokens

    def _without_tail(self, ids: list[int], span: Span) -> Span:
        """Remove white space after the end-of-turn token from a span, since generation stops before it."""
        start, stop = span
        last = next((i for i in range(stop - 1, start - 1, -1) if ids[i] in self._ends), None)
        return (start, last + 1) if last is not None and self._is_blank(ids[last + 1 : stop]) else span

    def _is_blank(self, ids: Sequence[int]) -> bool:
        return not any(i in self._ends for i in ids) and not str(self._tokenizer.decode(list(ids))).strip()

    def _wanted(self, conversation: Conversation) -> list[int]:
        """Return the indices of the answers whose places are needed."""
        answers = conversation.answers if self._needs_turns else []
        wanted = answers[-1:] if self._only_last else answers
        return wanted if self._train_all else [i for i in wanted if i not in conversation.left_out]


class Prefixed(_Templated):
    """Encodes with a template without marks: renders the text before and after each answer, and compares ids."""

    how = "assistant's tokens found by comparing rendered prefixes"

    def _render(self, conversation: Conversation) -> list[Rendered] | Problem:
        wanted, whole = self._wanted(conversation), self._prefix(conversation, len(conversation.turns))
        if 0 in wanted:
            return Problem(f"it begins with the assistant, {OTHERWISE}")
        texts = [whole]
        for i in wanted:
            texts.append(self._prefix(conversation, i, prompt=True))
            texts.append(whole if i + 1 == len(conversation.turns) else self._prefix(conversation, i + 1))
        return texts

    def _find(self, conversation: Conversation, texts: list[_Text]) -> list[Span] | Problem:
        whole, spans = texts[0].ids, []
        for number, i in enumerate(self._wanted(conversation)):
            before, after = texts[1 + 2 * number : 3 + 2 * number]
            span = span_between(whole, before.ids, after.ids, i + 1)
            if not isinstance(span, Problem):
                spans.append(self._without_tail(whole, span))
            elif not self._train_all:  # where all text is trained, only truncation needs the end of the turn
                return span
        return spans


class Marked(_Templated):
    """Encodes with a template that marks the assistant's text with {% generation %}."""

    how = "assistant's tokens found by the template's generation marks"

    def _render(self, conversation: Conversation) -> list[Rendered] | Problem:
        whole = self._prefix(conversation, len(conversation.turns))
        wanted = self._wanted(conversation)
        marks: list[Span] = [*whole.marks]
        if any(turn["role"] == "assistant" and i not in wanted for i, turn in enumerate(conversation.turns)):
            marks = [mark for i in wanted for mark in self._marks_of(conversation, i, whole)]
        filled = [mark for mark in marks if whole.text[slice(*mark)].strip()]
        speaking = [i for i in wanted if len(conversation.turns[i]) > 2 or conversation.turns[i]["content"].strip()]
        if len(filled) < len(speaking) and not self._train_all:
            return Problem(
                f"the template's generation marks are empty for {len(speaking) - len(filled)} of the "
                f"{len(speaking)} turns that the assistant speaks"
            )
        return [attrs.evolve(whole, marks=tuple(filled))]

    def _find(self, conversation: Conversation, texts: list[_Text]) -> list[Span] | Problem:
        ids = texts[0].ids
        places = places_in(texts[0].encoding.offsets, texts[0].marks)
        return [self._without_tail(ids, self._with_end(ids, span)) for span in places if span[0] < span[1]]

    def _marks_of(self, conversation: Conversation, answer: int, whole: Rendered) -> Sequence[Span]:
        """Return the marks of one answer: those that the conversation has with it, and not before it."""
        begin, end = (
            len(self._prefix(conversation, number).marks) if self._speaks(conversation, number) else 0
            for number in (answer, answer + 1)
        )
        return whole.marks[begin:end]

    def _speaks(self, conversation: Conversation, turns: int) -> bool:
        return any(turn["role"] == "assistant" for turn in conversation.turns[:turns])

    def _with_end(self, ids: list[int], span: Span) -> Span:
        """Extend a span by the end-of-turn token after it, if the marks leave that token out."""
        start, stop = span
        end = stop
        while end < len(ids) and self._is_blank(ids[end : end + 1]):
            end += 1
        return (
            (start, end + 1) if end < len(ids) and ids[end] in self._written | {self._tokenizer.eos_token_id} else span
        )
