"""Turns of a row: names of roles, tool calls, and which turns the data says not to train."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from femto_sft.conversation import NoConversation, Turn

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
WEIGHTS = ("weight", "train", "training")
"""Keys of a turn that say whether it is trained."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn for the reasoning before its answer; transformers passes each to templates under the others' names."""


def without_nulls(value: Any) -> Any:
    """Return `value` without the keys whose value is null, at any depth. Items of lists are kept.

    Parquet gives all rows the same keys, and fills those that a row does not have with null.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def read_turns(value: Any, key: str) -> tuple[Turn, ...]:
    """Return turns with `role` and `content`, converted from `from` and `value` where those are used."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise NoConversation(f"{key!r} holds a {type(value).__name__}, not a list of turns")
    return tuple(_turn(item, f"{key}[{number}]") for number, item in enumerate(value))


def take_weights(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], frozenset[int]]:
    """Return `turns` without the keys of `WEIGHTS`, and the indices of those that are not trained."""
    plain = tuple({key: value for key, value in turn.items() if key not in WEIGHTS} for turn in turns)
    return plain, frozenset(i for i, turn in enumerate(turns) if any(not turn.get(key, True) for key in WEIGHTS))


def read_text(value: Any, where: str) -> str:
    """Return `value` if it is valid text."""
    if not isinstance(value, str):
        raise NoConversation(f"{where} holds a {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise NoConversation(f"{where} holds half of a surrogate pair, which is not valid text") from None
    return value


def read_objects(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Return the objects of a list, which may be written as JSON text."""
    value = _parsed(value, where, "list")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise NoConversation(f"{where} holds a {type(value).__name__}, not a list")
    for number, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise NoConversation(f"{where}[{number}] holds a {type(item).__name__}, not an object")
    return tuple(dict(item) for item in value)


def _turn(item: Any, where: str) -> Turn:
    if not isinstance(item, Mapping):
        raise NoConversation(f"{where} holds a {type(item).__name__}, not a turn")
    turn = {key: value for key, value in item.items() if value != []}  # an empty list stands for an absent one
    role_key, text_key = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    if role_key not in turn:
        raise NoConversation(f"{where} has neither 'role' nor 'from'")
    said = turn.pop(role_key)
    role = ROLES.get(said, said) if isinstance(said, str) else said
    if role not in KNOWN_ROLES:
        raise NoConversation(f"{where} has the role {said!r}, which is none of {', '.join((*KNOWN_ROLES, *ROLES))}")
    if "tool_calls" in turn:
        turn["tool_calls"] = _calls(turn["tool_calls"], f"{where}.tool_calls")
    if text_key not in turn and not turn.get("tool_calls"):
        raise NoConversation(f"{where} has no {text_key!r}")
    _check_weights(turn, where)
    if len({turn[key] for key in REASONING if isinstance(turn.get(key), str)}) > 1:
        raise NoConversation(f"{where} holds different texts under {' and '.join(k for k in REASONING if k in turn)}")
    return {**turn, "role": role, "content": read_text(turn.pop(text_key, ""), f"{where}.{text_key}")}


def _check_weights(turn: Turn, where: str) -> None:
    found = {key: turn[key] for key in WEIGHTS if key in turn}
    for key, value in found.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            wanted = "0 or 1" if key == "weight" else "true or false"
            raise NoConversation(f"{where}.{key} is {value!r}, and must be {wanted}")
    if len({bool(value) for value in found.values()}) > 1:
        raise NoConversation(f"{where}: {' and '.join(found)} contradict each other")


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are objects, which may be written as JSON text."""
    calls = []
    for number, call in enumerate(read_objects(value, where)):
        place = f"{where}[{number}]"
        if isinstance(call.get("function"), Mapping):
            call["function"] = _with_arguments(call["function"], f"{place}.function")
        calls.append(_with_arguments(call, place))
    return calls


def _with_arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "arguments" not in function:
        return dict(function)
    arguments = _parsed(function["arguments"], f"{where}.arguments", "object")
    if not isinstance(arguments, Mapping):
        raise NoConversation(f"{where}.arguments holds {_short(function['arguments'])}, not a JSON object")
    return {**function, "arguments": dict(arguments)}


def _parsed(value: Any, where: str, what: str) -> Any:
    """Return `value`, read from JSON if it is text, without nulls."""
    if not isinstance(value, str):
        return value
    try:
        return without_nulls(json.loads(value))
    except ValueError:
        raise NoConversation(f"{where} holds {_short(value)}, not a JSON {what}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
