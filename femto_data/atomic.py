"""Atomic writes: a path that is complete or absent, and on disk before it has its name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside `path`; the block makes a file or a directory there, which then moves to `path`.

    The contents are synced before the move. An existing file, or an empty directory, at `path` is replaced. Where the
    block raises, its file or directory is removed and `path` stays as it was. A kill leaves the hidden name behind; the
    next write of `path` removes it. Two writers of one `path` must exclude each other.
    """
    partial = path.with_name(f".{path.name}.partial")
    remove(partial)
    try:
        yield partial
        sync_tree(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that is already raised says more
            remove(partial)
        raise


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing bytes, as `atomic_path` does: it is replaced when the block ends."""
    with atomic_path(path) as partial, partial.open("wb") as stream:
        yield stream


def write_atomic(path: Path, content: str | bytes | memoryview) -> None:
    """Write `content`, text as UTF-8, as the whole of `path`; complete or absent, as `atomic_path` says."""
    with open_atomic(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def remove(path: Path) -> None:
    """Remove the file or directory at `path`, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when a file's bytes, or a directory's list of names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Return when the file `path`, or the directory `path` with everything in it, is on disk."""
    for inner in [*path.rglob("*"), path] if path.is_dir() else [path]:
        sync(inner)
