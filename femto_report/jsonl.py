"""JSON Lines files: one object a line, with the number of its step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from femto_core.errors import UserError
from femto_data.atomic import write_atomic


class LineFile:
    """A file of lines, open for more of them; each is in the file at once and whole, or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, value: dict[str, Any]) -> None:
        """Append `value` as a line. Raises OSError where it does not fit; the file is then as it was."""
        end, rest = self._file.seek(0, 2), (json.dumps(value) + "\n").encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path`; none if it is absent. A last line that a kill cut off is left out.

    Raises `UserError` for any other line that is not an object with a step.
    """
    lines: list[dict[str, Any]] = []
    if path.exists():
        texts = path.read_bytes().rstrip(b"\0\n").split(b"\n")  # a crash of the machine may leave zeros at the end
        for number, text in enumerate(texts, start=1):
            line = _parse(text)
            if line is not None:
                lines.append(line)
            elif text and (number < len(texts) or not text.startswith(b"{")):
                raise UserError(
                    f"{path}, line {number}: not a JSON object with a step, as femto writes it; move the file away"
                )
    return lines


def keep_lines(path: Path, last: int) -> None:
    """Keep only the lines of steps up to `last`: a resumed run does the later steps again."""
    content = "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= last)
    if path.exists() and path.read_bytes() != content.encode():
        write_atomic(path, content)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
