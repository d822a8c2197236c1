"""A run's settings as a TOML file: reading it, and finding the line that sets a key."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from femto_core.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file. Raises `UserError` with the file's name, and the line if it is malformed."""
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None


def line_of(path: Path, keys: tuple[str, ...]) -> int | None:
    """Return the number of the line that sets `keys`, or opens the section of that name; None if there is none."""
    section = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        section = header.group(1).strip() if header else section
        key_of_line = re.match(r"\s*([\w.-]+)\s*=", line)
        if ".".join(filter(None, (section, key_of_line.group(1) if key_of_line else ""))) == ".".join(keys):
            return number
    return None
