"""The settings of a run: frozen sections, merged from defaults, a TOML file and flags.

A plugin adds a section through `femto_config_section`; flags, TOML keys and `--help` follow from its fields.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from femto_core.errors import UserError, suggest
from femto_core.sections import (
    CheckpointSection,
    DataSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RunSection,
    TrainSection,
)
from femto_core.strict import Mistake, structure
from femto_core.toml_file import line_of

T = TypeVar("T")
Tree = Mapping[str, Any]
"""Settings by section and key."""


@attrs.frozen(kw_only=True)
class Config:
    """All settings of a run. The sections of plugins are further fields of a subclass; see `config_class`."""

    plugins: tuple[str, ...] = ()
    """Plugins to activate, comma-separated; `no:NAME` blocks one, the built-in ones included."""
    run: RunSection = RunSection()
    train: TrainSection = TrainSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()

    def section(self, cls: type[T]) -> T:
        """Return the section that is an instance of `cls`. A plugin reads its own settings so, fully typed."""
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, cls):
                return value
        raise LookupError(f"no active plugin registered a config section of type {cls.__name__}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for TOML, defaults included. A setting that is None is left out: TOML has no null."""
        return attrs.asdict(self, filter=lambda _, value: value is not None)


def config_class(sections: Mapping[str, type[Any]]) -> type[Config]:
    """Return `Config` with one more field for each of `sections` (name -> attrs class; every field has a default).

    Raises `UserError` if a name is taken or is not an identifier, or if a field of a class has no default.
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
    made.__annotations__ = dict(sections)  # for typing.get_type_hints
    made.__doc__ = Config.__doc__
    return typing.cast("type[Config]", made)


def setting_kinds(cls: type[Config]) -> dict[str, Any]:
    """Return the type of every setting, by its dotted name."""
    sections = typing.get_type_hints(cls)
    return {
        f"{section}.{name}": kind
        for section, section_cls in sections.items()
        if attrs.has(section_cls)
        for name, kind in typing.get_type_hints(section_cls).items()
    }


def make_config(
    cls: type[Config], toml: Tree, flags: Tree, toml_path: str = "", defaults: Sequence[Tree] = ()
) -> Config:
    """Merge the sections' own defaults, `defaults`, `toml` and `flags` into a checked `cls`; later ones win.

    Raises `UserError` for the first unknown key, value of a wrong type, or value out of range.
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
        return _fit_defaults(structure(merged, cls), (toml, flags))
    except Mistake as mistake:
        raise UserError(_sentence(mistake, merged, flags, toml_path)) from None


def _fit_defaults(config: T, given: Sequence[Tree]) -> T:
    """Adapt each default that is in none of `given` to the settings that it depends on (`sections.fit`)."""
    for section in attrs.fields(type(config)):  # type: ignore[arg-type]
        cls = type(getattr(config, section.name))
        for field in attrs.fields(cls) if attrs.has(cls) else ():
            asked_for = any(_value_at((section.name, field.name), tree) is not None for tree in given)
            if "fit" in field.metadata and not asked_for:
                values = getattr(config, section.name)
                value = field.metadata["fit"](getattr(values, field.name), config)
                config = attrs.evolve(config, **{section.name: attrs.evolve(values, **{field.name: value})})  # type: ignore[misc]
    return config


def _sentence(mistake: Mistake, merged: Tree, flags: Tree, toml_path: str) -> str:
    """Say what is wrong with a setting, and whether a flag or a line of the file gave it."""
    name, where = ".".join(mistake.path), _where(mistake.path, flags, toml_path)
    if not mistake.reason:
        hint = suggest(mistake.path[-1], mistake.known)
        if len(mistake.path) > 1:
            return f"unknown key {name}{where}{hint}"
        return f"unknown section [{name}]{where}{hint or '; is its plugin active? (--plugins)'}"
    return f"{name} = {_value_at(mistake.path, merged)!r}{where}: {mistake.reason}"


def _where(path: tuple[str, ...], flags: Tree, toml_path: str) -> str:
    if _value_at(path, flags) is not None:
        return " (on the command line)"
    if not toml_path:
        return ""
    line = line_of(Path(toml_path), path)
    return f" ({toml_path})" if line is None else f" ({toml_path}, line {line})"


def _value_at(path: tuple[str, ...], tree: Tree) -> Any:
    value: Any = tree
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
