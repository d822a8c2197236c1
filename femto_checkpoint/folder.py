"""The folder of a run's checkpoints: which are complete, in which order they were committed, which may go.

`latest` lists them, the one committed last at its end. Steps alone do not tell: a run that goes on from an older
checkpoint leaves those of higher steps behind, and they belong to a past that it did not take.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from femto_checkpoint.files import sync, write_text
from femto_checkpoint.index import INDEX

LATEST = "latest"
PARTIAL = ".partial-"
REPLACED = ".replaced-"
NAME = re.compile(rf"(?:{re.escape(REPLACED)})?step-(\d+)")


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder` by step, one that was being replaced where it is the only one."""
    found = sorted((p for p in folder.glob("*step-*") if NAME.fullmatch(p.name)), key=lambda p: p.name)
    # Of two of one step, step-N sorts after .replaced-step-N and wins.
    return {int(m[1]): p for p in found if (m := NAME.fullmatch(p.name)) and (p / INDEX).is_file()}


def committed(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder` in the order of their commits, those of no record first, by step."""
    try:
        lines = (folder / LATEST).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        lines = []
    complete = complete_checkpoints(folder)
    order = {line: number for number, line in enumerate(lines)}
    return [complete[step] for step in sorted(complete, key=lambda step: (order.get(f"step-{step}", -1), step))]


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint committed last in `folder`, or the one of the highest step where that record is lost."""
    found = committed(folder)
    return found[-1] if found else None


def record(folder: Path, name: str) -> None:
    """Make `name` the latest. The record is on disk on return."""
    others = [path.name.removeprefix(REPLACED) for path in committed(folder)]
    write_text(folder / LATEST, "\n".join([*(other for other in others if other != name), name]) + "\n")
    sync(folder)


def rotate(folder: Path, *, keep: int, keep_every: int) -> None:
    """Remove all but the `keep` checkpoints committed last (0: none) and those of every `keep_every` steps."""
    for path in committed(folder)[:-keep] if keep else []:
        step = int(path.name.rpartition("-")[2])
        if not (keep_every and step % keep_every == 0):
            # Under another name first: what is half removed must not look like a checkpoint, and is swept up later.
            gone = path.with_name(f"{PARTIAL}step-{step}-removed")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what an interrupted save left behind. Only while nothing is being saved."""
    for old in folder.glob(f"{REPLACED}step-*"):
        final = old.with_name(old.name.removeprefix(REPLACED))
        if (old / INDEX).is_file() and not final.exists():
            old.rename(final)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for leftover in folder.glob(f"{PARTIAL}step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
