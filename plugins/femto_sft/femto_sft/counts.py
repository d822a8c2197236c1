"""What became of the conversations that were read, and how that is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs


@attrs.define
class Counts:
    """Each conversation that was read counts once in `kept` or in one of the numbers that say why it was left out."""

    read: int = 0
    """Rows, blank lines not counted."""
    blank: int = 0
    malformed: int = 0
    nothing_to_learn: int = 0
    """Without an answer, or with nothing left of it."""
    overlong: int = 0
    """Longer than a row, whatever became of them."""
    dropped: int = 0
    """Of those, left out by the policy."""
    kept: int = 0
    held_out: int = 0
    """Of the kept ones."""
    documents: int = 0
    """What the kept ones came to: more, where long ones were split."""
    lost_pieces: int = 0
    """Pieces of split conversations with nothing to learn."""
    lost_tokens: int = 0
    """Tokens that do not fit: of dropped conversations, behind a truncation, in lost pieces."""
    tokens: int = 0
    trained_tokens: int = 0
    first_malformed: tuple[int, str] = (0, "")
    """Number of its source, and its place there with the reason."""

    def lines(self, policy: str, names: Sequence[str]) -> Iterator[str]:
        """Yield what was left out, and why, in sentences; nothing where all was kept. `names` are the sources'."""
        if self.malformed:
            source, rest = self.first_malformed
            yield f"{self.malformed:,} malformed rows skipped, the first of them {names[source]}, {rest}"
        if self.nothing_to_learn:
            yield f"{self.nothing_to_learn:,} conversations left out: nothing in them to learn"
        if self.overlong:
            cut = {"drop": "left out", "truncate": "cut at a turn", "split": "split"}[policy]
            rest = f" ({self.dropped:,} of them left out)" if self.dropped and policy != "drop" else ""
            pieces = f", {self.lost_pieces:,} pieces without anything to learn left out" if self.lost_pieces else ""
            yield f"{self.overlong:,} over-long conversations {cut}{rest}{pieces}; {self.lost_tokens:,} tokens lost"
        if self.blank:
            yield f"{self.blank:,} blank lines skipped"
