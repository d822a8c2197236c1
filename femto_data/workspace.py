"""The hidden folder in which an output is made: locked by one process, found by its key, removed when stale."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from femto_core.errors import UserError
from femto_data.atomic import sync, sync_tree

_ASIDE = "replaced"
_SWEPT = ".swept"  # suffix of a folder that is being removed


class Interrupted(UserError):  # noqa: N818 - not a mistake, and the user can resume
    """The work was interrupted from outside; the same command resumes it."""


@attrs.frozen
class Workspace:
    """A hidden folder beside `output`, whose name has the key of the work."""

    output: Path
    folder: Path

    def publish(self, made: Path) -> None:
        """Rename `made`, a directory in this workspace, to the output, and remove the workspace.

        Every byte is on disk before the rename. An earlier output is moved aside first. If the rename then fails, the
        earlier output is put back; after a kill in between, the next workspace for this output puts it back.
        """
        sync_tree(made)
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
        sync(self.output.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder. It is renamed first, so that after a kill no run takes the rest for its own."""
        _remove(self.folder)


@contextmanager
def open_workspace(output: Path, key: str) -> Iterator[Workspace]:
    """Lock the workspace of `key` for `output` while the block runs; the folder stays on disk unless removed.

    Workspaces of other keys, which belong to other arguments or sources, are removed first. Raises UserError if another
    process has a workspace for this output, or if the folder cannot be written.
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
    """Return an open descriptor that holds the lock on `file`.

    A process that releases the lock removes the file, so the locked file is compared with the one at the path.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:  # the last holder has just removed it: try again
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
    """Restore the earlier output after a kill between the two renames of `publish`."""
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


def _escaped(prefix: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in prefix)
