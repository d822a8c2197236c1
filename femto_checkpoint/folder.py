"""The folder of a run's checkpoints: which are complete, in which order they were committed, which are removed.

The file `latest` lists the checkpoints in the order of their commits. The step numbers do not give that order: a run
that resumes from an older checkpoint leaves checkpoints of higher steps, which belong to an abandoned past.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from femto_checkpoint.index import INDEX
from femto_data.atomic import sync, write_atomic

LATEST = "latest"
PARTIAL = ".partial-"
REPLACED = ".replaced-"
NAME = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d+)")


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder` by step.

    A checkpoint that was being replaced counts if the new one of that step is not complete.
    """
    found = sorted((p for p in folder.glob("*step-*") if NAME.fullmatch(p.name)), key=lambda p: p.name)
    # If a step has both, step-N sorts after .replaced-step-N and wins.
    return {int(m[1]): p for p in found if (m := NAME.fullmatch(p.name)) and (p / INDEX).is_file()}


def committed(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder` in the order of their commits.

    Checkpoints that `latest` does not list come first, by step.
    """
    try:
        lines = (folder / LATEST).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        lines = []
    complete = complete_checkpoints(folder)
    order = {line: number for number, line in enumerate(lines)}
    return [complete[step] for step in sorted(complete, key=lambda step: (order.get(f"step-{step}", -1), step))]


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint committed last in `folder`; if `latest` is lost, the checkpoint of the highest step."""
    found = committed(folder)
    return found[-1] if found else None


def record(folder: Path, name: str) -> None:
    """Record `name` as the checkpoint committed last. The record is on disk on return."""
    others = [path.name.removeprefix(REPLACED) for path in committed(folder)]
    write_atomic(folder / LATEST, "\n".join([*(other for other in others if other != name), name]) + "\n")
    sync(folder)


def rotate(folder: Path, *, keep: int, keep_every: int) -> None:
    """Remove checkpoints, except the `keep` committed last (0: keep all) and every `keep_every`-th step (0: none)."""
    for path in committed(folder)[:-keep] if keep else []:
        step = int(path.name.rpartition("-")[2])
        if not (keep_every and step % keep_every == 0):
            # Rename first, so that after a kill a half-removed checkpoint does not look complete; `sweep` removes it.
            gone = path.with_name(f"{PARTIAL}step-{step}-removed")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the leftovers of interrupted saves. Call it only while nothing is being saved."""
    for old in folder.glob(f"{REPLACED}step-*"):
        final = old.with_name(old.name.removeprefix(REPLACED))
        if (old / INDEX).is_file() and not final.exists():
            old.rename(final)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for leftover in folder.glob(f"{PARTIAL}step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
