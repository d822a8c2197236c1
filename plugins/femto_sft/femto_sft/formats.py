"""Formats of conversation data, recognised by a row's keys, and their conversion to `Conversation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from femto_sft.conversation import Conversation, NoConversation, Turn

Row = Mapping[str, Any]
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Other names of the roles that templates know."""
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


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
    if missing:
        found = ", ".join(map(repr, row)) or "none"
        raise NoConversation(f"no {missing[0]!r} among its keys ({found}), which format {format.name} needs")
    return format.read(row)


def _messages(row: Row) -> Conversation:
    return Conversation(_with_system(row, _turns(row["messages"], "messages")), tools=_tools(row))


def _conversations(row: Row) -> Conversation:
    return Conversation(_with_system(row, _turns(row["conversations"], "conversations")), tools=_tools(row))


def _instruction(row: Row) -> Conversation:
    question, more = _text(row["instruction"], "instruction"), row.get("input")
    if more is not None and _text(more, "input").strip():
        question = f"{question}\n\n{more}"
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": _text(row["output"], "output")})
    return Conversation(_with_system(row, turns))


def _prompt(row: Row) -> Conversation:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        turns: tuple[Turn, ...] = (
            {"role": "user", "content": _text(prompt, "prompt")},
            {"role": "assistant", "content": _text(completion, "completion")},
        )
        return Conversation(turns, context=1)
    before = _turns(prompt, "prompt")
    return Conversation((*before, *_turns(completion, "completion")), context=len(before), tools=_tools(row))


def _turns(value: Any, key: str) -> tuple[Turn, ...]:
    """Return turns with `role` and `content`, converted from `from` and `value` where those are used."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise NoConversation(f"{key!r} holds a {type(value).__name__}, not a list of turns")
    return tuple(_turn(item, f"{key}[{number}]") for number, item in enumerate(value))


def _turn(item: Any, where: str) -> Turn:
    if not isinstance(item, Mapping):
        raise NoConversation(f"{where} holds a {type(item).__name__}, not a turn")
    turn = {key: value for key, value in item.items() if value is not None}
    role_key, text_key = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    if role_key not in turn:
        raise NoConversation(f"{where} has neither 'role' nor 'from'")
    said = turn.pop(role_key)
    role = ROLES.get(said, said) if isinstance(said, str) else said
    if role not in KNOWN_ROLES:
        raise NoConversation(f"{where} has the role {said!r}, which is none of {', '.join((*KNOWN_ROLES, *ROLES))}")
    if text_key not in turn and not turn.get("tool_calls"):
        raise NoConversation(f"{where} has no {text_key!r}")
    return {**turn, "role": role, "content": _text(turn.pop(text_key, ""), f"{where}.{text_key}")}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise NoConversation(f"{where} holds a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise NoConversation(f"{where} holds half of a surrogate pair, which is not valid text") from None
    return value


def _with_system(row: Row, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    system = row.get("system")
    if system is None or not _text(system, "system"):
        return turns
    if turns and turns[0]["role"] == "system":
        raise NoConversation("both the key 'system' and the first turn hold a system prompt")
    return ({"role": "system", "content": system}, *turns)


def _tools(row: Row) -> tuple[Any, ...] | None:
    tools = row.get("tools")
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise NoConversation(f"'tools' holds a {type(tools).__name__}, not a list")
    return tuple(tools)


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
