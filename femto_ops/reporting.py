"""What the ranks of a run say when they fail: the first to fail says all, the others what differs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

PATIENCE_S = 4.0
"""How long other ranks leave rank 0 to speak where they cannot ask who has spoken."""


def report(message: str, environment: Mapping[str, str]) -> None:
    """Print `message` to standard error, unless another rank of the run has said the same.

    Ranks ask the store through which they met; before torch is loaded, rank 0 speaks for all. `environment` has the
    launcher's variables; without them there is one rank alone.
    """
    rank = environment.get("RANK", "")
    if "torch" in sys.modules:
        told = _told(message, environment)
    else:
        told = ""
        time.sleep(PATIENCE_S if rank not in ("", "0") else 0)  # the launcher ends this rank meanwhile
    last = _last_line(message)
    if told == last:
        return
    if told:  # the reason is the other rank's; this may be what follows from it
        message = last
    print(f"[rank {rank}] {message}" if rank not in ("", "0") else message, file=sys.stderr, flush=True)


def _told(message: str, environment: Mapping[str, str]) -> str:
    """Return the last line of what another rank has said; an empty text where this rank is the first, or alone."""
    from femto_ops.meeting import join, read_place

    try:
        place = read_place(environment)
        if place is None or place.world_size == 1:
            return ""
        own = f"{place.rank} {_last_line(message)}"
        rank, _, line = join(place, PATIENCE_S).compare_set("told", "", own).decode().partition(" ")
    except (ValueError, RuntimeError, OSError):  # the store is gone with the rank that had it
        return ""
    return "" if rank == str(place.rank) else line


def _last_line(message: str) -> str:
    return message.strip().rpartition("\n")[2]
