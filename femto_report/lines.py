"""Files of JSON lines, one object a line with the number of its step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of `path`, none where it is absent; a last one that a kill cut off is left out."""
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def keep_lines(path: Path, last: int) -> None:
    """Leave only the lines of steps up to `last` in `path`: the others belong to a past that did not happen."""
    kept = [line for line in read_lines(path) if line["step"] <= last]
    beside = path.with_name(f".{path.name}")
    beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(beside, path)  # a kill before this loses nothing
