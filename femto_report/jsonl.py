"""JSON Lines files: one object a line, with the number of its step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from femto_data.atomic import write_atomic


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of `path`; none if it is absent. A last line that a kill cut off is left out."""
    lines = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
    return lines


def keep_lines(path: Path, last: int) -> None:
    """Keep only the lines of steps up to `last`: a resumed run does the later steps again."""
    kept = [line for line in read_lines(path) if line["step"] <= last]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
