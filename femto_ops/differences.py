"""In what two trees of plain values differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return the dotted key of the first value in which two different trees differ, and both values; None for none."""
    key = next(key for key in sorted({*one, *other}) if one.get(key) != other.get(key))
    mine, theirs = one.get(key), other.get(key)
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        inner, mine, theirs = first_difference(mine, theirs)
        key = f"{key}.{inner}"
    return key, mine, theirs
