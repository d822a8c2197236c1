"""Requests to stop: signals, and the end of the launcher. They are heard even while a collective waits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

PATIENCE_S = 60.0
"""How long the step in progress may take after a request."""
ECHO_S = 2.0
"""A launcher passes on the signal that a terminal has sent to all of its processes: within this time it is the same."""
POLL_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Listens for requests to stop, in a thread of its own: Python's own handlers wait for the main thread.

    Until `pass_to` is called, SIGTERM raises `KeyboardInterrupt` as SIGINT does. From then on a request is passed on,
    and the process leaves with `os._exit` after a second SIGINT or SIGTERM, or where no step has ended within 60 s. If
    `launched`, the end of the parent process is a request too.
    """

    def __init__(self, *, launched: bool) -> None:
        self._launched, self._parent = launched, os.getppid()
        self._undo = contextlib.ExitStack()
        self._process = os.getpid()
        self._request: Callable[[], None] = lambda: None
        self._asked: float | None = None
        """When the first request came."""
        self._over: Callable[[], bool] = lambda: True

    def __enter__(self) -> StopRequests:
        self._handle(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._undo.close()
        self._request, self._over = lambda: None, lambda: True

    def pass_to(self, request: Callable[[], None], *, is_over: Callable[[], bool]) -> None:
        """Call `request`, in another thread, where the process is asked to stop.

        `is_over` says that the last step is done: what follows, such as a save, may take its time.
        """
        self._request, self._over = request, is_over
        hearing, speaking = os.pipe()
        os.set_blocking(speaking, False)
        self._undo.callback(os.close, speaking)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(speaking, warn_on_full_buffer=False))
        for number in SIGNALS:
            self._handle(number, lambda *_: None)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, args=(hearing,), name="stop-requests", daemon=True).start()

    def _handle(self, number: signal.Signals, handler: Callable[..., object]) -> None:
        before = signal.signal(number, handler)
        self._undo.callback(signal.signal, number, signal.SIG_DFL if before is None else before)

    def _forget(self) -> None:
        """In a child, such as a loader process: its signals are not this process's."""
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL and os.getppid() == self._process:
            with contextlib.suppress(ValueError):  # forked by a thread that is not the main one
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends them

    def _listen(self, hearing: int) -> None:
        orphaned = False
        while True:
            ready, _, _ = select.select([hearing], [], [], POLL_S)
            numbers = os.read(hearing, 64) if ready else b""
            if ready and not numbers:  # the other end is closed
                os.close(hearing)
                return
            for number in numbers:
                if number in SIGNALS:
                    self._hear(number)
            if self._launched and not orphaned and os.getppid() != self._parent:
                orphaned = True
                _say("the launcher of this process is gone; it stops after this step")
                self._ask()
            if self._asked is not None and not self._over() and time.monotonic() - self._asked > PATIENCE_S:
                _leave(
                    1, f"no step has ended in the {PATIENCE_S:.0f} s since this process was asked to stop: it leaves"
                )

    def _hear(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._request()
        elif self._asked is None:
            self._ask()
        elif not self._launched or time.monotonic() - self._asked > ECHO_S:
            _leave(128 + number, "asked to stop a second time: this process leaves at once")

    def _ask(self) -> None:
        if self._asked is None:
            self._asked = time.monotonic()
        self._request()


def _leave(code: int, sentence: str) -> None:
    _say(sentence)
    os._exit(code)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"femto: {sentence}\n".encode())
