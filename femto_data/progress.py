"""Progress of `femto preprocess`: one line on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import attrs
from rich.console import Console
from rich.status import Status

from femto_data.documents import TextPiece


@attrs.define
class Progress:
    """The current phase, and how much of the input it has read."""

    _status: Status | None
    phase: str = ""

    def watch(self, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        """Yield `pieces`, and show how many documents and characters have passed."""
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
    """Show the progress line while the block runs, unless `quiet` or not on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Progress(None)
    else:
        with console.status("preparing") as status:
            yield Progress(status)
