"""A directory that many processes want: the first one builds it under a lock, the others wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from femto_core.errors import UserError
from femto_data.atomic import atomic_path


def build_once(directory: Path, setting: str, make: Callable[[Path], object]) -> Path:
    """Return `directory`; where it is missing, `make` fills it under another name, so it is complete or absent.

    Processes that call at the same time wait for the one that builds. An existing directory is only read, never locked,
    so it may be on a read-only disk. Raises whatever `make` raises, and UserError, which names the setting `setting`,
    where the parent directory cannot be written or is full.
    """
    if directory.is_dir():
        return directory
    cache = directory.parent
    lock = FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(f"{setting} = {cache} cannot be written ({error.strerror}); name another directory") from error
    try:
        if not directory.is_dir():  # another process may have made it while this one waited
            try:
                with atomic_path(directory) as partial:
                    partial.mkdir()
                    make(partial)
            except OSError as error:  # errors of reading are UserErrors by now
                raise UserError(
                    f"{setting} = {cache}: {directory.name} cannot be completed ({error.strerror or error}); nothing "
                    f"of it is kept: make room, or name another directory"
                ) from error
    finally:
        lock.release()
    return directory
