"""The check that the chat template shows every part of a conversation.

A part that can be changed or taken away without a change of the rendered text was not shown. A template may do so for
a part of one conversation and not of another, so the verdict holds for conversations of one structure: the same turns
with the same keys, and the same of the template's own marks (such as </think>) in their texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from femto_sft.conversation import Conversation, Problem, Turn
from femto_sft.template import REFUSALS, Template, refused
from femto_sft.turns import REASONING

_QUOTED = re.compile(r"'([^'\\\n]*)'|\"([^\"\\\n]*)\"")
_MOST = 10_000  # structures that are remembered
_CONTENT = ("content", *REASONING, "name", "tool_calls", "function_call")
"""Keys of a turn that hold something said; of all others, an unread one is only reported."""
_THINKING_ENDS = "</think>"
DEVELOPER = "developer turns are given to the template as system, since it does not show developer"
DROPPED = "earlier turns have reasoning that the template shows only in the last turns"


@attrs.frozen
class _Part:
    """A part of a conversation, and the conversation with that part changed or taken away."""

    name: str
    without: Conversation
    turn: int = -1
    """Index of the part's turn; -1 for the row's tools."""
    key: str = "tools"


@attrs.frozen
class _Verdict:
    """What the template does not show of conversations of one structure."""

    hidden: tuple[str, ...] = ()
    """Names of parts for which the conversation is refused."""
    dropped: int = 0
    """Number of turns whose reasoning is dropped because others follow."""
    unread: tuple[str, ...] = ()
    """Further keys of turns that are not read, one for each turn."""


class ShownParts:
    """Checks conversations, and counts what it reports without refusing."""

    def __init__(self, template: Template) -> None:
        self.notes: Counter[str] = Counter()
        """Sentences to say once, with the number of turns they are true of."""
        self.unread: Counter[str] = Counter()
        """Further keys of turns that the template does not read, with the number of turns that have them."""
        self._template = template
        quoted = {first or second for first, second in _QUOTED.findall(template.source)}
        self._marks = sorted(text for text in quoted if re.search(r"[^\w\s]", text))
        self._known: dict[Any, _Verdict] = {}

    def check(self, conversation: Conversation) -> Conversation | Problem:
        """Return the conversation to render, or the problem that the template does not show all of it.

        A developer's turns become the system's where the template shows only those.
        """
        found = self._judge(conversation)
        developer = sum(turn["role"] == "developer" for turn in conversation.turns)
        if developer and (isinstance(found, Problem) or found.hidden):
            turns = tuple({**t, "role": "system"} if t["role"] == "developer" else t for t in conversation.turns)
            renamed = attrs.evolve(conversation, turns=turns)
            again = self._judge(renamed)
            if isinstance(again, _Verdict) and not again.hidden:
                conversation, found = renamed, again
                self.notes[DEVELOPER] += developer
        if isinstance(found, Problem):
            return found
        if found.hidden:
            more = f" and {len(found.hidden) - 3} more parts" if len(found.hidden) > 3 else ""
            return Problem(
                f"the chat template (sft.template) does not show {' and '.join(found.hidden[:3])}{more}, so the model "
                "would not see it"
            )
        if found.dropped:
            self.notes[DROPPED] += found.dropped
        self.unread.update(found.unread)
        return conversation

    def _judge(self, conversation: Conversation) -> _Verdict | Problem:
        structure = self._structure(conversation)
        if structure in self._known:
            return self._known[structure]
        try:
            verdict = self._compare(conversation)
        except REFUSALS as error:
            return refused(error)
        if len(self._known) < _MOST:
            self._known[structure] = verdict
        return verdict

    def _compare(self, conversation: Conversation) -> _Verdict:
        text = self._text(conversation)
        hidden: dict[tuple[int, str], str] = {}
        unread, dropped = [], 0
        for part in parts(conversation):
            # A part follows the whole that it belongs to, whose name is enough.
            if (part.turn, part.key) in hidden or self._text_or_none(part.without) != text:
                continue
            if part.turn >= 0 and part.key not in _CONTENT:
                unread.append(part.key)
            elif part.key in REASONING and self._shown_when_last(conversation, part):
                dropped += 1
            else:
                hidden[part.turn, part.key] = part.name
        return _Verdict(tuple(hidden.values()), dropped, tuple(unread))

    def _shown_when_last(self, conversation: Conversation, part: _Part) -> bool:
        """Whether a turn's reasoning is shown where the conversation ends with it, and a user spoke since."""
        if all(turn["role"] != "user" for turn in conversation.turns[part.turn + 1 :]):
            return False
        texts = [self._text_or_none(c, part.turn + 1) for c in (conversation, part.without)]
        return texts[0] != texts[1]

    def _text_or_none(self, conversation: Conversation, turns: int | None = None) -> str | None:
        """Return the text of the first `turns` turns, or None where the template refuses them."""
        try:
            return self._text(conversation, turns)
        except REFUSALS:
            return None

    def _text(self, conversation: Conversation, turns: int | None = None) -> str:
        return self._template.render(conversation.turns[:turns], conversation.tools).text

    def _structure(self, conversation: Conversation) -> Any:
        turns = tuple(
            (turn["role"], *sorted((key, self._kind(turn[key])) for key in turn if key != "role"))
            for turn in conversation.turns
        )
        return turns, len(conversation.tools or ())

    def _kind(self, value: Any) -> tuple[Any, ...]:
        """Return what of a value decides whether templates show it."""
        if isinstance(value, str):
            return (bool(value.strip()), *(mark for mark in self._marks if mark in value))
        if isinstance(value, Mapping):
            return tuple(sorted((str(key), self._kind(item)) for key, item in value.items()))
        if isinstance(value, Sequence):
            return tuple(self._kind(item) for item in value)
        return (repr(value),)


def parts(conversation: Conversation) -> Iterator[_Part]:
    """Yield all parts of a conversation; an empty text or list is none.

    Texts are changed rather than taken away, because a template may write a default for an absent one, or refuse it.
    """
    tools = conversation.tools or ()
    if tools:
        yield _Part("its 'tools'", attrs.evolve(conversation, tools=None))
    for number in range(len(tools) if len(tools) > 1 else 0):
        rest = (*tools[:number], *tools[number + 1 :])
        yield _Part(f"tools[{number}]", attrs.evolve(conversation, tools=rest))
    for i, turn in enumerate(conversation.turns):
        for name, key, changed in _parts_of_turn(turn):
            turns = (*conversation.turns[:i], changed, *conversation.turns[i + 1 :])
            whose = f"the {name!r} of turn {i + 1} (role {turn['role']!r})"
            yield _Part(whose, attrs.evolve(conversation, turns=turns), i, key)


def _parts_of_turn(turn: Turn) -> Iterator[tuple[str, str, Turn]]:
    """Yield (name, key, the turn with the part changed) for all parts of a turn."""
    reasoning = {key: turn[key] for key in REASONING if key in turn}
    if any(reasoning.values()):
        key = next(iter(reasoning))
        yield key, key, {**turn, **{name: _changed(value) for name, value in reasoning.items()}}
    if _THINKING_ENDS in turn["content"]:
        thought = turn["content"].replace(_THINKING_ENDS, f"x{_THINKING_ENDS}", 1)
        yield f"content before {_THINKING_ENDS}", REASONING[0], {**turn, "content": thought}
    for key, value in turn.items():
        if key not in (*REASONING, "role", "tool_calls") and value not in ("", {}) and str(value).strip():
            without = {name: kept for name, kept in turn.items() if name != key}
            yield key, key, {**turn, key: _changed(value)} if isinstance(value, str) else without
    calls = turn.get("tool_calls") or ()
    if calls:
        yield "tool_calls", "tool_calls", {key: value for key, value in turn.items() if key != "tool_calls"}
    for number, call in enumerate(calls):
        place = f"tool_calls[{number}]"
        before, after = calls[:number], calls[number + 1 :]
        if len(calls) > 1:
            yield place, "tool_calls", {**turn, "tool_calls": [*before, *after]}
        function = call.get("function", call)
        for key in ("name", "arguments"):
            if isinstance(function, Mapping) and function.get(key):
                other = {**function, key: _changed(function[key])}
                changed = {**call, "function": other} if "function" in call else other
                yield f"{place}.{key}", "tool_calls", {**turn, "tool_calls": [*before, changed, *after]}


def _changed(value: Any) -> Any:
    return f"{value}x" if isinstance(value, str) else {**value, "x": "x"} if isinstance(value, Mapping) else None
