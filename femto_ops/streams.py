"""What a process finds around it: standard output that is closed, full, or narrower than Unicode; a deleted folder."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

NAME = "standard output"


class Output(io.TextIOWrapper):
    """Standard output, whose errors name it: nothing else tells them from those of files."""

    def write(self, text: str) -> int:
        with naming_output():
            return super().write(text)

    def flush(self) -> None:
        with naming_output():
            super().flush()


@contextlib.contextmanager
def naming_output() -> Iterator[None]:
    """Have an `OSError` of the block name standard output."""
    try:
        yield
    except OSError as error:
        error.filename = NAME
        raise


def prepare_process() -> str:
    """Have both streams replace characters that they cannot show; return a sentence where something is missing."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    stream = sys.stdout
    if type(stream) is io.TextIOWrapper:
        encoding, errors, lines, through = stream.encoding, stream.errors, stream.line_buffering, stream.write_through
        sys.stdout = Output(stream.detach(), encoding, errors, line_buffering=lines, write_through=through)
    if stream is None:
        return "standard output is closed; send it to a file, or to /dev/null"
    if not os.stat(os.curdir).st_nlink:
        return "the working directory has been deleted; change to one that exists"
    if sys.flags.optimize > 1:
        return "PYTHONOPTIMIZE=2 (python -OO) removes docstrings, which transformers reads; set it to 1"
    return ""


def flush_output() -> int:
    """Write what standard output still holds; return 0, or an exit code where it cannot be written, which is said."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return failed_output(error)
    return 0


def failed_output(error: BaseException) -> int:
    """Return 0 where standard output did not raise `error`; otherwise say that it cannot be written: an exit code.

    A reader (head, less) that has seen enough gets no sentence.
    """
    if not isinstance(error, OSError) or error.filename != NAME:
        return 0
    sentence = drop_output(error)
    if isinstance(error, BrokenPipeError):
        return 141
    print(f"femto: {sentence}", file=sys.stderr, flush=True)
    return 2


def drop_output(error: OSError) -> str:
    """Drop what standard output, which failed with `error`, holds, and all that follows; return a sentence about it."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
    return f"standard output cannot be written: {error.strerror or error}"
