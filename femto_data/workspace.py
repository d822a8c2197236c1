"""The folder beside an output in which it is made: held by one process, found again by its key, swept when stale."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from femto_core.errors import UserError

_ASIDE = "replaced"
_SWEPT = ".swept"  # the end of the name of a folder that is being removed


class Interrupted(UserError):  # noqa: N818 - a kind of ending, and the user can mend it
    """Something from outside ended the work: what is done so far is kept, and the same command goes on from there."""


@attrs.frozen
class Workspace:
    """A hidden folder beside `output`, named by the key of what is being made."""

    output: Path
    folder: Path

    def publish(self, made: Path) -> None:
        """Rename `made`, a directory in this workspace, to the output, and remove the workspace.

        What was there is moved aside first and comes back should the second rename fail, or, after a kill between the
        two, when the next run opens a workspace for this output. Every byte is on disk before the name.
        """
        sync_all(made)
        aside = self.folder / _ASIDE
        there = self.output.exists()
        if there:
            os.replace(self.output, aside)
        try:
            os.replace(made, self.output)
        except BaseException:
            if there:
                os.replace(aside, self.output)
            raise
        _sync(self.output.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder; a kill meanwhile leaves it under a name that no run takes for its own."""
        _remove(self.folder)


@contextmanager
def open_workspace(output: Path, key: str) -> Iterator[Workspace]:
    """Hold the workspace of `key` for `output` while the block runs; it stays on disk unless removed.

    Workspaces of other keys are removed first, whatever was left in them; they belonged to other arguments or sources.
    Raises UserError where another process holds one for this output, or where nothing can be written.
    """
    prefix = f".{output.name}."
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(output.parent / f"{prefix}lock", output)
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror}); name another directory") from error
    try:
        folder = output.parent / f"{prefix}partial-{key}"
        for left in sorted(output.parent.glob(f"{_escaped(prefix)}partial-*")):
            if (left / _ASIDE).exists() and not left.name.endswith(_SWEPT):
                _put_back(left / _ASIDE, output)
            if left != folder:
                _remove(left)
        folder.mkdir(exist_ok=True)
        yield Workspace(output, folder)
    finally:
        (output.parent / f"{prefix}lock").unlink()
        os.close(lock)


def _lock(file: Path, output: Path) -> int:
    """Return an open descriptor that holds the lock `file`, which whoever held it before may have removed meanwhile."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:  # it has just been removed
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"another process is writing {output} right now; wait for it, or name another directory"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _put_back(aside: Path, output: Path) -> None:
    """Mend what a kill left between the two renames of `publish`."""
    if output.exists():
        _remove(aside)
    else:
        os.replace(aside, output)


def _remove(folder: Path) -> None:
    if not folder.name.endswith(_SWEPT):
        swept = folder.with_name(folder.name + _SWEPT)
        if swept.exists():
            shutil.rmtree(swept)
        os.replace(folder, swept)
        folder = swept
    shutil.rmtree(folder)


def sync_all(folder: Path) -> None:
    """Return when everything in `folder` is on disk."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _escaped(prefix: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in prefix)
