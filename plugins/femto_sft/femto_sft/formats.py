"""Formats of conversation data, recognised by a row's keys, and their conversion to `Conversation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from femto_sft.conversation import Conversation, NoConversation, Turn
from femto_sft.turns import read_objects, read_text, read_turns, take_weights, without_nulls

Row = Mapping[str, Any]


@attrs.frozen
class Format:
    """A format of rows."""

    name: str
    keys: tuple[str, ...]
    """Required keys; a row that has all of them is in this format."""
    more: tuple[str, ...]
    """Optional keys that are read too."""
    read: Callable[[Row], Conversation]


def recognise(row: Row) -> Format | None:
    """Return the first format whose keys are all in `row`; a key with the value null does not count."""
    present = {key for key, value in row.items() if value is not None}
    return next((known for known in FORMATS.values() if present.issuperset(known.keys)), None)


def read_row(row: Row, format: Format) -> Conversation:  # noqa: A002 - it is what is meant
    """Return the conversation in `row`. Raises `NoConversation` if it is not in `format`."""
    missing = [key for key in format.keys if row.get(key) is None]
    if missing and missing[0] in row:
        raise NoConversation(f"{missing[0]!r} is null, and format {format.name} needs it")
    if missing:
        found = ", ".join(map(repr, row)) or "none"
        raise NoConversation(f"no {missing[0]!r} among its keys ({found}), which format {format.name} needs")
    try:
        return format.read(without_nulls(row))
    except RecursionError:
        raise NoConversation("it is nested too deeply") from None


def _messages(row: Row) -> Conversation:
    return _conversation(row, read_turns(row["messages"], "messages"))


def _conversations(row: Row) -> Conversation:
    return _conversation(row, read_turns(row["conversations"], "conversations"))


def _conversation(row: Row, turns: tuple[Turn, ...], context: int = 0) -> Conversation:
    turns, left_out = take_weights(_with_system(row, turns))
    return Conversation(turns, context, _tools(row), left_out)


def _instruction(row: Row) -> Conversation:
    question, more = read_text(row["instruction"], "instruction"), row.get("input")
    if more is not None and read_text(more, "input").strip():
        question = f"{question}\n\n{more}"
    turns = (
        {"role": "user", "content": question},
        {"role": "assistant", "content": read_text(row["output"], "output")},
    )
    return Conversation(_with_system(row, turns))


def _prompt(row: Row) -> Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        turns: tuple[Turn, ...] = (
            {"role": "user", "content": read_text(prompt, "prompt")},
            {"role": "assistant", "content": read_text(completion, "completion")},
        )
        return Conversation(turns, context=1, tools=_tools(row))
    before = read_turns(prompt, "prompt")
    return _conversation(row, (*before, *read_turns(completion, "completion")), len(before))


def _with_system(row: Row, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    system = row.get("system")
    if system is None or not read_text(system, "system"):
        return turns
    if turns and turns[0]["role"] == "system":
        raise NoConversation("both the key 'system' and the first turn hold a system prompt")
    return ({"role": "system", "content": system}, *turns)


def _tools(row: Row) -> tuple[Any, ...] | None:
    return read_objects(row["tools"], "'tools'") or None if row.get("tools") else None


FORMATS = {
    known.name: known
    for known in (
        Format("messages", ("messages",), ("system", "tools"), _messages),
        Format("conversations", ("conversations",), ("system", "tools"), _conversations),
        Format("instruction", ("instruction", "output"), ("input", "system"), _instruction),
        Format("prompt", ("prompt", "completion"), ("tools",), _prompt),
    )
}
"""All formats by name, in the order in which `recognise` tries them."""
