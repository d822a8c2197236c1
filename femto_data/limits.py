"""Limits of time and memory for what a tokenizer's files bring along: patterns, rules and chat templates.

The work runs in a thread of this process, and the caller watches it. A process of its own could be ended more surely,
but would load the libraries a second time, which takes seconds; the watched thread costs 0.05 ms. A thread over its
limit goes on until the process ends, which is what a `UserError` leads to.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from femto_core.errors import UserError

T = TypeVar("T")
SECONDS = 10.0  # of processor time for one item, which takes milliseconds; other processes do not use it up
GIB = 2.0  # of memory that one item may add
_POLL_S = 0.05
_STATUS = Path("/proc/self/statm")


def each_within_limits(items: Iterable[T], what: str, more_s: float = 0.0) -> list[T]:
    """Return all of `items`, each made within the limits; an exception of theirs is raised here.

    Raises UserError where one item takes more than `SECONDS` and `more_s` of processor time or `GIB` of memory, or
    where a library in Rust panics; `what` begins its sentence, which names the file at fault.
    """
    made: list[T] = []
    raised: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            for item in items:
                made.append(item)  # noqa: PERF402 - the watcher counts them
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            raised.append(error)
        ended.set()

    threading.Thread(target=work, name="femto-limited", daemon=True).start()
    count, since, size = -1, 0.0, 0.0
    while not ended.wait(_POLL_S):
        if len(made) != count:
            count, since, size = len(made), time.process_time(), _resident()
        elif time.process_time() - since > SECONDS + more_s:
            raise UserError(f"{what} takes more than {SECONDS + more_s:.0f} s of processor time, as if it never ended")
        elif _resident() - size > GIB * 2**30:
            raise UserError(f"{what} takes more than {GIB:.0f} GiB of memory")
    for error in raised:
        if type(error).__name__ == "PanicException":  # of pyo3, which has no name to import
            raise UserError(f"{what} fails ({' '.join(str(error).split())[:200]})") from None
        raise error
    return made


def within_limits(work: Callable[[], T], what: str) -> T:
    """Return `work()`, made within the limits as `each_within_limits` says."""
    [made] = each_within_limits((work() for _ in range(1)), what)
    return made


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process allocate at most `GIB` more in the block; Python then raises MemoryError.

    This stops a single allocation, which no watcher sees in time. Only for work in Python: Rust aborts the process.
    Without effect where the system has no /proc or enforces no such limit.
    """
    if not _STATUS.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(_statm(5) + GIB * 2**30)
    bounds = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([most, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _resident() -> float:
    """Return the bytes of memory that this process uses, or 0 where the system does not say."""
    return _statm(1) if _STATUS.exists() else 0.0


def _statm(field: int) -> float:
    return int(_STATUS.read_text().split()[field]) * float(resource.getpagesize())
