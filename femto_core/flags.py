"""Words of a command line into the options of a command and the settings of a run."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from femto_core.commands import Command
from femto_core.errors import UserError, suggest
from femto_core.strict import Mistake, Text, is_a, structure


def read_flags(command: Command, words: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values in `words` by section and key; the options of the command are in section "".

    `settings` has the type of each setting by its dotted name, and is empty if the command takes no run. The forms are
    `--name value`, `--name=value`, `--switch`, `--no-switch`, and `--name value value` for a tuple.

    Raises `UserError` for an unknown flag, a flag without its value, and a value without a flag.
    """
    places = [field.name for field in attrs.fields(command.options) if is_positional(field)]
    kinds = {k: v for k, v in typing.get_type_hints(command.options).items() if k not in places} | {**settings}
    result: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, inline = word[2:].partition("=")
        section, dot, name = flag.replace("-", "_").rpartition(".")
        value: Any
        if not word.startswith("--"):
            if not places or word.startswith("-"):
                advice = "; settings are written --section.key value" if settings else see_help(command.name)
                raise UserError(f"unexpected argument {word!r}{advice}")
            section, name, value = "", places.pop(0), Text(word)
        elif (kind := kinds.get(section + dot + name)) is None:
            name = name.removeprefix("no_")
            if has_value or kinds.get(section + dot + name) is not bool:
                raise UserError(_unknown(command, flag, kinds))
            value = Text("false")
        elif is_a(kind, tuple):
            parts = [inline] if has_value else list(itertools.takewhile(lambda part: not part.startswith("--"), rest))
            rest = rest if has_value else rest[len(parts) :]
            value = [Text(part) for part in parts]
        elif has_value:
            value = Text(inline)
        elif kind is bool and (not rest or rest[0].lower() not in ("true", "false")):
            value = Text("true")
        elif rest and not rest[0].startswith("--"):
            value = Text(rest.pop(0))
        else:
            raise UserError(f"--{flag} needs a value")
        result.setdefault(section, {})[name] = value
    return result


def make_options(command: Command, given: Mapping[str, Any]) -> Any:
    """Return the command's options, from their values by name.

    Raises `UserError` for an option that is missing, of a wrong type, or out of range.
    """
    fields = attrs.fields_dict(command.options)
    for field in sorted(fields.values(), key=is_positional, reverse=True):
        if field.default is attrs.NOTHING and field.name not in given:
            raise UserError(f"femto {command.name} needs {label(field)}{see_help(command.name)}")
    try:
        return structure(given, command.options)
    except Mistake as mistake:
        name = mistake.path[0]
        raise UserError(f"{label(fields[name])} = {given[name]!r} (on the command line): {mistake.reason}") from None


def is_positional(field: attrs.Attribute[Any]) -> bool:
    """Tell whether an option is given without a flag."""
    return bool(field.metadata.get("positional"))


def label(field: attrs.Attribute[Any], section: str = "") -> str:
    """Return an option or setting as it is written: `--data.seq-len`, or `CHECKPOINT` if it is positional."""
    return field.name.upper() if is_positional(field) else f"--{section}{field.name}".replace("_", "-")


def see_help(command: str) -> str:
    return f" (femto {command} --help lists all)"


def _unknown(command: Command, flag: str, kinds: Mapping[str, Any]) -> str:
    """Say that a flag is unknown, which one is near, and where all are listed."""
    sections = {name.partition(".")[0] for name in kinds if "." in name}
    section = flag.partition(".")[0].replace("-", "_") if sections and "." in flag else ""
    near = suggest(f"--{flag}", [f"--{name}".replace("_", "-") for name in kinds])
    hint = near if not section or suggest(section, sections) else "; is its plugin active? (--plugins)"
    return f"unknown flag --{flag}{hint}{see_help('train' if section else command.name)}"
