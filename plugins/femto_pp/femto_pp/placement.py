"""The placement of a pipeline's chunks on its ranks.

Each rank holds the same number of chunks. Over the whole pipeline, from the embedding to the head, chunks are numbered
as virtual stages.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Placement:
    """A table of which rank holds which virtual stage.

    Raises ValueError for a table that misses or repeats a virtual stage, or gives one rank more chunks than another.
    """

    table: tuple[tuple[int, ...], ...]
    """For each rank the virtual stages of its chunks, in ascending order."""
    _places: dict[int, tuple[int, int]] = attrs.field(init=False, eq=False, repr=False)
    """Virtual stage -> (rank, chunk)."""

    @_places.default
    def _look_up(self) -> dict[int, tuple[int, int]]:
        return {stage: (rank, chunk) for rank, row in enumerate(self.table) for chunk, stage in enumerate(row)}

    def __attrs_post_init__(self) -> None:
        stages = sorted(stage for row in self.table for stage in row)
        if len({len(row) for row in self.table}) != 1 or not stages or stages != list(range(len(stages))):
            raise ValueError(f"{self.table} must hold each virtual stage from 0 on once, equally many on each rank")
        if any(list(row) != sorted(row) for row in self.table):
            raise ValueError(f"{self.table}: the virtual stages of a rank must be in ascending order")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.table)

    @property
    def chunks(self) -> int:
        """The number of chunks of each rank."""
        return len(self.table[0])

    @property
    def virtual_stages(self) -> int:
        """The number of chunks of all ranks together."""
        return self.size * self.chunks

    def rank(self, virtual_stage: int) -> int:
        """Return the rank that holds a virtual stage."""
        return self._places[virtual_stage][0]

    def chunk(self, virtual_stage: int) -> int:
        """Return a virtual stage's number among the chunks of its rank."""
        return self._places[virtual_stage][1]

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return the virtual stage of a rank's chunk."""
        return self.table[rank][chunk]


def round_robin(size: int, chunks: int = 1) -> Placement:
    """Return the placement of Narayanan et al. 2021: rank r holds virtual stages r, r + size, r + 2 size, ..."""
    return Placement(tuple(tuple(range(rank, size * chunks, size)) for rank in range(size)))
