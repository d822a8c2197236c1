"""A directory that many processes want and one of them makes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from femto_core.errors import UserError
from femto_data.workspace import sync_all


def made_once(directory: Path, setting: str, make: Callable[[Path], object]) -> Path:
    """Return `directory`, which `make` fills under another name if it is not there: it is complete or absent.

    Processes that call at once wait for the one that makes it. One that is there is neither locked nor written to, so
    it may lie where nothing can be. Raises UserError, which names `setting`, where nothing can be written, and whatever
    `make` raises.
    """
    if directory.is_dir():
        return directory
    cache = directory.parent
    partial = directory.with_name(f"{directory.name}.partial")
    lock = FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(f"{setting} = {cache} cannot be written ({error.strerror}); name another directory") from error
    try:
        if not directory.is_dir():  # another process may have made it while this one waited
            shutil.rmtree(partial, ignore_errors=True)  # under the lock, a killed run's
            partial.mkdir()
            try:
                make(partial)
                sync_all(partial)
                os.replace(partial, directory)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    finally:
        lock.release()
    return directory
