"""Standard output that is closed, full, or narrower than Unicode."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def prepare_output() -> str:
    """Have both streams replace characters that they cannot show; return a sentence where standard output is closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    return "standard output is closed; send it to a file, or to /dev/null" if sys.stdout is None else ""


def flush_output() -> int:
    """Write what standard output still holds. Where it cannot be written, say so and return an exit code, otherwise 0.

    A reader (head, less) that has seen enough gets no sentence.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError as error:
        drop_output(error)
        return 141
    except OSError as error:
        print(f"femto: {drop_output(error)}", file=sys.stderr, flush=True)
        return 2
    return 0


def drop_output(error: OSError) -> str:
    """Drop what standard output, which failed with `error`, holds, and all that follows; return a sentence about it."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
    return f"standard output cannot be written: {error.strerror or error}"
