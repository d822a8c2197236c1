"""Counts of conversations kept and left out, and the report of what was left out and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs


@attrs.define
class ConversationCounts:
    """Counts over all conversations. Each counts once: as kept, malformed, nothing_to_learn or dropped."""

    read: int = 0
    """Rows read, without blank lines."""
    blank: int = 0
    malformed: int = 0
    nothing_to_learn: int = 0
    """Conversations without a trained token."""
    overlong: int = 0
    """Conversations longer than a row, whether dropped, truncated or split."""
    dropped: int = 0
    """Over-long conversations of which nothing is kept."""
    kept: int = 0
    held_out: int = 0
    """Kept conversations that are held out."""
    documents: int = 0
    """Documents made of kept conversations; a conversation that is split becomes several."""
    lost_pieces: int = 0
    """Pieces of split conversations that are left out, having no trained token."""
    lost_tokens: int = 0
    """Tokens of over-long conversations that are left out: dropped, truncated, or in lost pieces."""
    tokens: int = 0
    trained_tokens: int = 0
    first_malformed: tuple[int, str] = (0, "")
    """Number of the first malformed row's source, and (place in it, with the reason)."""

    def lines(self, policy: str, names: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each reason why something was left out. `names` are the sources' names."""
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
