"""How far `femto preprocess` is: one line on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import attrs
from rich.console import Console
from rich.status import Status

from femto_data.documents import Piece


@attrs.define
class Progress:
    """What is being done, and how much of it has been read."""

    _status: Status | None
    phase: str = ""

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pass `pieces` on, and show how many documents and characters they came to."""
        documents = characters = 0
        shown = 0.0
        for piece in pieces:
            yield piece
            documents += piece.last
            characters += len(piece.text)
            if self._status is not None and time.monotonic() - shown > 0.5:
                shown = time.monotonic()
                self._status.update(f"{self.phase}: {documents:,} documents, {characters / 1e6:,.0f} M characters")


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[Progress]:
    """Show a line while the block runs, unless `quiet`."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Progress(None)
    else:
        with console.status("preparing") as status:
            yield Progress(status)
