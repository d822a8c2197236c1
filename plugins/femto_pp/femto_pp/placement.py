"""Which rank has which stage: stages are numbered from the embedding to the head, a rank may have several (chunks)."""

from __future__ import annotations

import attrs


@attrs.frozen
class Placement:
    """Stages dealt out to ranks, round after round."""

    size: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.size * self.chunks

    def rank(self, stage: int) -> int:
        """Return the rank that has a stage."""
        return stage % self.size

    def chunk(self, stage: int) -> int:
        """Return a stage's number among those of its rank."""
        return stage // self.size

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage that is a rank's chunk."""
        return chunk * self.size + rank
