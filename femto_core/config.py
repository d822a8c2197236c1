"""Configuration: frozen sections, filled from their defaults, then a TOML file, then flags, by one and the same reader.

A plugin adds a section of its own through `femto_config_section`; flags, TOML keys and `--help` follow from its fields.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError
from cattrs.v import format_exception

from femto_core.errors import UserError, suggest
from femto_core.sections import (
    CheckpointSection,
    DataSection,
    EvalSection,
    LogSection,
    ModelSection,
    OptimSection,
    OutOfRange,
    ProfileSection,
    RunSection,
    SampleSection,
    TrainSection,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
Tree = Mapping[str, Any]
"""Settings by section and key."""


@attrs.frozen(kw_only=True)
class Config:
    """Everything a run depends on. Plugins' sections are further fields of a subclass; see `config_class`."""

    plugins: tuple[str, ...] = ()
    """Plugins to activate, comma-separated; `no:NAME` blocks one, the built-in ones included."""
    run: RunSection = RunSection()
    train: TrainSection = TrainSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    eval: EvalSection = EvalSection()
    sample: SampleSection = SampleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    profile: ProfileSection = ProfileSection()

    def section(self, cls: type[T]) -> T:
        """Return the section that is an instance of `cls`: how a plugin reads its own settings, fully typed."""
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, cls):
                return value
        raise LookupError(f"no active plugin registered a config section of type {cls.__name__}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain TOML-ready values, every default spelt out but None, which TOML does not know."""
        return attrs.asdict(self, filter=lambda _, value: value is not None)


def config_class(sections: Mapping[str, type[Any]]) -> type[Config]:
    """Return `Config` with one more field for each of `sections` (name -> attrs class; every field has a default).

    Raises `UserError` where a name is taken or is none, or a class cannot be filled from its defaults alone.
    """
    taken = {*(f.name for f in attrs.fields(Config)), *vars(Config)}
    for name, cls in sections.items():
        if name in taken:
            raise UserError(f"config section [{name}] of {cls.__module__} is one of femto's own; rename it")
        if not name.isidentifier():
            raise UserError(f"config section [{name}] of {cls.__module__} is no Python name; rename it")
        if not attrs.has(cls) or any(f.default is attrs.NOTHING for f in attrs.fields(cls)):
            raise UserError(
                f"config section [{name}]: {cls.__name__} must be an attrs class, each field with a default"
            )
    fields = {name: attrs.field(type=cls, factory=cls) for name, cls in sections.items()}
    made = attrs.make_class("Config", fields, bases=(Config,), frozen=True, kw_only=True)
    made.__annotations__ = dict(sections)  # tyro reads annotations, not attrs fields
    made.__doc__ = Config.__doc__
    return typing.cast("type[Config]", made)


class Text(str):
    """A value typed on the command line: text that still has to become the field's own type."""


def parse_flags(arguments: Sequence[str], cls: type[Config]) -> dict[str, Any]:
    """Turn `--section.key value`, `--section.key=value`, `--section.switch` and `--section.no-switch` into a tree.

    Raises `UserError` for an unknown flag, naming the nearest one, and for a value that stands alone.
    """
    known = flag_types(cls)
    result: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}; settings are written --section.key value")
        flag, has_value, inline = word[2:].partition("=")
        key = flag.replace("-", "_")
        value: Any
        negated = re.sub(r"\.no_", ".", key)
        if key not in known and known.get(negated) is bool and not has_value:
            key, value = negated, Text("false")
        elif key not in known:
            flags = {"--" + name.replace("_", "-") for name in known}
            foreign = "." in key and not suggest(key.partition(".")[0], {name.partition(".")[0] for name in known})
            hint = "; is its plugin active? (--plugins)" if foreign else suggest("--" + flag, flags)
            raise UserError(f"unknown flag --{flag}{hint} (femto train --help lists all)")
        elif _is_a(known[key], tuple):
            words = [inline] if has_value else []
            while not has_value and rest and not rest[0].startswith("--"):
                words.append(rest.pop(0))
            value = [Text(part) for part in words]
        elif has_value:
            value = Text(inline)
        elif known[key] is bool and (not rest or rest[0].lower() not in ("true", "false")):
            value = Text("true")
        elif rest and not rest[0].startswith("--"):
            value = Text(rest.pop(0))
        else:
            raise UserError(f"--{flag} needs a value")
        section, _, name = key.partition(".")
        result.setdefault(section, {})[name] = value
    return result


def flag_types(cls: type[Config]) -> dict[str, Any]:
    """Return the type of every setting, by its dotted name."""
    sections = typing.get_type_hints(cls)
    return {
        f"{section}.{name}": kind
        for section, section_cls in sections.items()
        if attrs.has(section_cls)
        for name, kind in typing.get_type_hints(section_cls).items()
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises `UserError` naming file and line where it is missing or malformed."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return values
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None


def make_config(
    cls: type[Config], toml: Tree, flags: Tree, toml_path: str = "", defaults: Sequence[Tree] = ()
) -> Config:
    """Merge the sections' own defaults, `defaults`, `toml` and `flags` (later ones win) into a checked `cls`.

    Raises `UserError` with the first problem: unknown key (and the nearest real one), wrong type, value out of range.
    """
    merged: dict[str, Any] = {}
    for layer in (*defaults, toml, flags):
        for section, values in layer.items():
            if isinstance(values, Mapping) and isinstance(merged.get(section, {}), Mapping):
                merged[section] = {**merged.get(section, {}), **values}
            else:
                merged[section] = values
    for section, kind in typing.get_type_hints(cls).items():
        if attrs.has(kind) and not isinstance(merged.get(section, {}), Mapping):
            raise UserError(f"[{section}] must be a section{_where((section,), flags, toml_path)}")
    try:
        return _converter().structure(merged, cls)
    except ClassValidationError as group:
        path, error, owner = _first_problem(group, (), cls)
        raise UserError(_sentence(path, error, owner, merged, flags, toml_path)) from None


def _sentence(
    path: tuple[str, ...], error: BaseException, owner: type[Any], merged: Tree, flags: Tree, toml_path: str
) -> str:
    """Say what is wrong with the setting at `path`, and whether it came from a flag or from a line of the file."""
    if isinstance(error, ForbiddenExtraKeysError):
        extra = sorted(error.extra_fields)[0]
        known = [f.name for f in attrs.fields(owner)]
        where, hint = _where((*path, extra), flags, toml_path), suggest(extra, known)
        if path:
            return f"unknown key {'.'.join((*path, extra))}{where}{hint}"
        return f"unknown section [{extra}]{where}{hint or '; is its plugin active? (--plugins)'}"
    if isinstance(error, OutOfRange):
        path = (*path, error.field) if path[-1:] != (error.field,) else path
    value: Any = merged
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else value
    reason = str(error) if isinstance(error, OutOfRange | WrongType) else format_exception(error, owner)
    return f"{'.'.join(path)} = {value!r}{_where(path, flags, toml_path)}: {reason}"


def _where(path: tuple[str, ...], flags: Tree, toml_path: str) -> str:
    inside: Any = flags
    for key in path:
        inside = inside.get(key) if isinstance(inside, Mapping) else None
    if inside is not None:
        return " (on the command line)"
    if not toml_path:
        return ""
    section = ""
    for number, line in enumerate(Path(toml_path).read_text(encoding="utf-8").splitlines(), start=1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        section = header.group(1).strip() if header else section
        key_of_line = re.match(r"\s*([\w.-]+)\s*=", line)
        full = ".".join(filter(None, (section, key_of_line.group(1) if key_of_line else "")))
        if full == ".".join(path):
            return f" ({toml_path}, line {number})"
    return f" ({toml_path})"


def _first_problem(
    error: BaseException, path: tuple[str, ...], owner: type[Any]
) -> tuple[tuple[str, ...], BaseException, type[Any]]:
    """Descend to the first leaf of cattrs' error tree; return its path, itself, and the class it belongs to."""
    if isinstance(error, ClassValidationError):
        with_notes, without = error.group_exceptions()
        if without:
            return path, without[0], error.cl
        child, note = with_notes[0]
        return _first_problem(child, (*path, note.name), note.type if attrs.has(note.type) else error.cl)
    if isinstance(error, IterableValidationError):
        return _first_problem(error.exceptions[0], path, owner)
    return path, error, owner


class WrongType(ValueError):  # noqa: N818 - reads as the reason it states
    """A value of another type than the field's."""


def _is_a(kind: Any, origin: Any) -> bool:
    return typing.get_origin(kind) is origin


def _converter() -> cattrs.Converter:
    """Return a strict converter: no int from 3.7, no bool from 1, no list from text; unknown keys are refused."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind, article in ((int, "a whole number"), (float, "a number"), (bool, "true or false"), (str, "text")):
        converter.register_structure_hook(kind, _strict(kind, article))
    converter.register_structure_hook_func(lambda k: _is_a(k, Literal), _literal)
    converter.register_structure_hook_func(lambda k: _is_a(k, tuple), lambda v, k: _tuple(v, k, converter))
    return converter


def _strict(kind: type[Any], article: str) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if isinstance(value, Text) and kind is not str:
            lowered = value.strip().lower()
            with contextlib.suppress(ValueError):
                value = {"true": True, "false": False}.get(lowered, value) if kind is bool else kind(lowered)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise WrongType(f"must be {article}")
        if kind is float and not math.isfinite(value):
            raise WrongType("must be a finite number")
        return str(value) if kind is str else value

    return structure


def _literal(value: Any, kind: Any) -> Any:
    choices: tuple[Any, ...] = typing.get_args(kind)
    for choice in choices:
        if str(choice) == value if isinstance(value, Text) else (type(choice), choice) == (type(value), value):
            return choice
    raise WrongType(f"must be one of {', '.join(map(str, choices))}{suggest(str(value), map(str, choices))}")


def _tuple(value: Any, kind: Any, converter: cattrs.Converter) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise WrongType("must be a list")
    kinds = typing.get_args(kind)
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise WrongType(f"must be {len(kinds)} values")
    return tuple(converter.structure(item, kind) for item, kind in zip(value, kinds, strict=True))
