"""Settings put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = dict[str, dict[str, Any]]
"""Settings by section and key."""


def merged(*settings: Mapping[str, Mapping[str, Any]]) -> Values:
    """Return all `settings` together, the later ones on top."""
    result: Values = {}
    for values in settings:
        for section, entries in values.items():
            result[section] = {**result.get(section, {}), **entries}
    return result
