"""Plain values into attrs classes, strictly: no whole number from 3.7, no true from 1, no list from text."""

from __future__ import annotations

import contextlib
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError
from cattrs.v import format_exception

from femto_core.errors import suggest
from femto_core.sections import OutOfRange

T = TypeVar("T")


class Text(str):
    """A value from the command line: text that has yet to become the type of its field."""


class WrongType(ValueError):  # noqa: N818 - reads as the reason it states
    """The value has another type than its field."""


@attrs.define
class Mistake(Exception):  # noqa: N818 - as above
    """The first value that does not fit, or the first key that the class does not have."""

    path: tuple[str, ...]
    """Its keys, from the outermost."""
    reason: str
    """What the value must be; empty for an unknown key."""
    known: Sequence[str] = ()
    """The keys beside an unknown one."""


def structure(values: Mapping[str, Any], cls: type[T]) -> T:
    """Return an instance of the attrs class `cls` made of `values`. Raises `Mistake` for the first that does not fit.

    Unknown keys are refused. `Text` becomes a number or a truth value where the field wants one.
    """
    try:
        return _converter().structure(values, cls)
    except ClassValidationError as group:
        raise _first_mistake(group, (), cls) from None


def is_a(kind: Any, origin: Any) -> bool:
    """Tell whether the type `kind` is a parametrized `origin`, as tuple[int, ...] is a tuple."""
    return typing.get_origin(kind) is origin


def _first_mistake(error: BaseException, path: tuple[str, ...], owner: type[Any]) -> Mistake:
    """Descend to the first leaf of the error tree of cattrs; `owner` is the class that the leaf belongs to."""
    if isinstance(error, ClassValidationError):
        with_notes, without = error.group_exceptions()
        if without:
            return _first_mistake(without[0], path, error.cl)
        child, note = with_notes[0]
        return _first_mistake(child, (*path, note.name), note.type if attrs.has(note.type) else error.cl)
    if isinstance(error, IterableValidationError):
        return _first_mistake(error.exceptions[0], path, owner)
    if isinstance(error, ForbiddenExtraKeysError):
        return Mistake((*path, min(error.extra_fields)), "", [field.name for field in attrs.fields(owner)])
    if isinstance(error, OutOfRange) and path[-1:] != (error.field,):
        path = (*path, error.field)
    return Mistake(path, str(error) if isinstance(error, OutOfRange | WrongType) else format_exception(error, owner))


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind, article in ((int, "a whole number"), (float, "a number"), (bool, "true or false"), (str, "text")):
        converter.register_structure_hook(kind, _strict(kind, article))
    converter.register_structure_hook_func(lambda k: is_a(k, Literal), _literal)
    converter.register_structure_hook_func(lambda k: is_a(k, tuple), lambda v, k: _tuple(v, k, converter))
    return converter


def _strict(kind: type[Any], article: str) -> Callable[[Any, Any], Any]:
    def read(value: Any, _: Any) -> Any:
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

    return read


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
