"""What the ranks of a run say when they fail: the first to fail says all, the others what differs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

PATIENCE_S = 4.0
"""How long other ranks leave rank 0 to speak where they cannot ask who has spoken."""


def report(message: str, environment: Mapping[str, str]) -> None:
    """Print `message` to standard error, unless another rank of the run has said the same.

    Where a launcher keeps a store for the ranks, they find out there who was first. Elsewhere, and before torch is
    loaded, rank 0 speaks for all. `environment` has the launcher's variables; without them there is one rank alone.
    """
    rank, last = environment.get("RANK", "0"), _last_line(message)
    told = _told(last, environment) if "torch" in sys.modules else None
    if told == last:
        return
    if told:  # what the other rank has said is the reason, and this may be what follows from it
        message = last
    elif told is None and rank != "0":
        time.sleep(PATIENCE_S)  # if rank 0 has the same message, it has printed it and ended the run by now
    print(message if rank == "0" else f"[rank {rank}] {message}", file=sys.stderr, flush=True)


def _told(line: str, environment: Mapping[str, str]) -> str | None:
    """Return the last line of what the first rank to fail has said, or an empty text if it is this rank, with `line`.

    None: there is no store to ask.
    """
    from femto_ops.meeting import join, read_place

    try:
        place = read_place(environment)
        if place is None or not place.launcher_hosts:
            return None
        rank, _, told = join(place, PATIENCE_S).compare_set("told", "", f"{place.rank} {line}").decode().partition(" ")
    except (ValueError, RuntimeError, OSError):
        return None
    return "" if rank == str(place.rank) else str(told)


def _last_line(message: str) -> str:
    return message.strip().rpartition("\n")[2]
