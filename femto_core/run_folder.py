"""The folder of a run: its name, and the lock that keeps two runs apart."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from femto_core.config import Config
from femto_core.errors import UserError
from femto_core.mesh import Mesh

LOCK_S = 8.0  # the loader processes of a run that was killed hold its lock until they notice, within 5 s


def make_run_folder(config: Config, mesh: Mesh) -> tuple[Path, BaseFileLock]:
    """Create the run's folder and lock it on rank 0; return its path. Raises `UserError` rather than mix two runs."""
    name: str = mesh.from_first("" if mesh.rank else config.run.name or _new_name(Path(config.run.dir)))
    folder = Path(config.run.dir) / name
    lock = FileLock(folder / ".lock")
    problem = ""
    if mesh.rank == 0 and not (problem := _take(folder, lock)):
        section, checkpoints = config.checkpoint, folder / "checkpoints"
        earlier = (folder / "metrics.jsonl").exists() or any(checkpoints.glob("step-*"))
        own = section.resume == "auto" or checkpoints.resolve() in Path(section.resume).resolve().parents
        if earlier and (section.weights_only or not own):
            lock.release()
            problem = (
                f"{folder} holds an earlier run, and this one would not go on with it; choose another --run.name, or "
                "set --checkpoint.resume auto without --checkpoint.weights-only"
            )
    if problem := mesh.from_first(problem):
        raise UserError(problem)
    return folder, lock


def _new_name(runs: Path) -> str:
    """Return the date and time, numbered where another run began in the same second; its folder is made in `runs`."""
    stamp = name = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        try:
            (runs / name).mkdir(parents=True)
        except FileExistsError:
            number += 1
            name = f"{stamp}-{number}"
        except OSError:
            return name  # `_take` will say what is wrong
        else:
            return name


def _take(folder: Path, lock: BaseFileLock) -> str:
    """Create `folder` and lock it; return what is wrong, if anything."""
    owner = folder / ".owner"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_S)
        with contextlib.suppress(OSError):  # on a full disk
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        who = (owner.exists() and owner.read_text(encoding="utf-8", errors="replace")) or "another process"
        return f"{folder} is in use: {who} is training there now; wait for it, or choose another --run.name"
    except OSError as error:
        return f"run.dir: {folder} cannot be written: {error}"
    return ""
