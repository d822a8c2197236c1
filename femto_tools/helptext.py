"""The text of `--help`: usage, what a command does, and each option with its type, its sentence and its default."""

from __future__ import annotations

import ast
import inspect
import itertools
import shutil
import textwrap
import typing
from collections.abc import Iterator
from typing import Any, Literal

import attrs

from femto_core.commands import Command
from femto_core.config import Config
from femto_core.flags import is_positional, label
from femto_core.strict import is_a

MARGIN = " " * 32
RUN = "[RUN.toml] [--plugins NAMES] [--section.key value ...]"


def command_help(command: Command, settings: Config | None) -> str:
    """Return the help of a command. If `settings` are given, they are listed too, with their values as defaults."""
    fields = attrs.fields(command.options)
    usage = ["usage: femto", command.name, *(label(field) for field in fields if is_positional(field))]
    usage += [RUN] * command.takes_run + ["[--option value ...]"] * any(not is_positional(field) for field in fields)
    parts = [" ".join(usage), "", inspect.getdoc(command.options) or "", "", *_entries(command.options, None, "")]
    if settings is not None:
        for field in attrs.fields(type(settings)):
            section = getattr(settings, field.name)
            if attrs.has(type(section)):
                text = inspect.getdoc(type(section)) or ""
                parts += ["", f"[{field.name}] {text}", *_entries(type(section), section, f"{field.name}.")]
    elif command.takes_run:
        parts += ["", "Each setting of the run is a flag too; femto train --help lists them."]
    return "\n".join(parts).replace("\n\n\n", "\n\n").strip()


def sentences(cls: type[Any]) -> dict[str, str]:
    """Return the string below each field, by the field's name. A class without source has none."""
    found = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        for field, text in itertools.pairwise(getattr(definition, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _entries(cls: type[Any], values: object, section: str) -> Iterator[str]:
    """Yield an entry for each field. Defaults are the fields' own, or those of the instance `values`."""
    kinds, texts = typing.get_type_hints(cls), sentences(cls)
    for field in sorted(attrs.fields(cls), key=is_positional, reverse=True):
        kind, head = kinds[field.name], label(field, section)
        if kind is bool:
            head += ", " + head.replace(f"--{section}", f"--{section}no-")
        elif not is_positional(field):
            head += f" {_word(kind)}"
        default = field.default if values is None else getattr(values, field.name)
        text = " ".join(filter(None, (texts.get(field.name), _default(default))))
        width = min(120, shutil.get_terminal_size().columns)
        filled = textwrap.fill(text, width, initial_indent=MARGIN, subsequent_indent=MARGIN, break_on_hyphens=False)
        fits = len(head) < len(MARGIN) - 2
        entry = f"  {head}".ljust(len(MARGIN)) + filled[len(MARGIN) :] if fits else f"  {head}\n{filled}"
        yield entry.rstrip()


def _word(kind: Any) -> str:
    """Return a type as `--help` shows it."""
    arguments = typing.get_args(kind)
    if is_a(kind, Literal):
        return "|".join(map(str, arguments))
    if is_a(kind, tuple):
        return f"{_word(arguments[0])} ..." if arguments[-1] is ... else " ".join(map(_word, arguments))
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(kind, "VALUE")


def _default(value: Any) -> str:
    if value is attrs.NOTHING or value is None:
        return "" if value is None else "(required)"
    text = " ".join(map(repr, value)) if isinstance(value, tuple) else str(value)
    return f"(default: {text.lower() if isinstance(value, bool) else text})" if text else ""
