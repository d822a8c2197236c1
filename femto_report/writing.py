"""What observers write: a file or a screen that fails is said once, and training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from femto_ops.streams import drop_output


class Writing:
    """The files of one observer during one run."""

    def __init__(self) -> None:
        self._failed: set[Path] = set()

    @contextlib.contextmanager
    def to(self, path: Path) -> Iterator[None]:
        """Run the block, which writes `path`: where it raises `OSError`, warn instead, once for each path."""
        try:
            yield
        except OSError as error:
            self.failed(path, error)

    def failed(self, path: Path, error: BaseException) -> None:
        """Warn that `path` could not be written, the first time."""
        if path not in self._failed:
            self._failed.add(path)
            warn(f"{path} cannot be written: {reason(error)}; training goes on without it")


def reason(error: BaseException) -> str:
    """Return what went wrong in a few words, without the path, which the sentence around them names."""
    number = error.errno if isinstance(error, OSError) else None
    return f"[Errno {number}] {os.strerror(number)}" if number else str(error) or type(error).__name__


def warn(text: str) -> None:
    """Print a warning to standard error, or nowhere."""
    with contextlib.suppress(OSError, ValueError):
        print(f"WARNING  {text}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print `text` to standard output at once. An output that fails is warned of; what follows is then dropped."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        warn(f"{drop_output(error)}; training goes on without it")


def check_places(folder: Path, files: tuple[str, ...], folders: tuple[str, ...]) -> str:
    """Return a sentence about the first of `files` that is no file or of `folders` that is none; empty: all fit."""
    for names, fits, kind in ((files, Path.is_file, "file"), (folders, Path.is_dir, "folder")):
        for path in (folder / name for name in names):
            if path.exists() and not fits(path):
                return f"{path} must be a {kind}, and is none; move it away, or choose another --run.name"
    return ""
