"""Which rows a rank reads at which step: a pure function of seed, step and global batch."""

from __future__ import annotations

import functools
from typing import Literal

import attrs
import torch

from femto_core.errors import UserError

PAD = -1  # in place of a row's index: a row that fills the batch up and carries no loss


@attrs.frozen(kw_only=True)
class DistributedSampler:
    """Deals the rows of a global batch out to the ranks that read different rows, in micro-batches.

    `remainder` says what becomes of an epoch's last rows where they fill no global batch: "drop" leaves them out,
    "pad" makes a last batch of them, filled up with `PAD`. Raises `UserError` for sizes that do not fit.
    """

    rows: int
    global_batch: int
    micro_batch: int
    size: int
    """Ranks that read different rows."""
    rank: int
    """This rank's number among them."""
    seed: int
    shuffle: bool
    remainder: Literal["drop", "pad"]

    def __attrs_post_init__(self) -> None:
        if self.global_batch % (self.size * self.micro_batch):
            raise UserError(
                f"data.global_batch = {self.global_batch} is not a multiple of {self.size} data-parallel ranks x "
                f"data.micro_batch = {self.micro_batch}"
            )
        if self.rows < self.size:
            raise UserError(f"{self.rows} rows are too few for {self.size} data-parallel ranks; use fewer processes")
        if not self.steps_per_epoch:
            raise UserError(
                f"{self.rows} rows do not fill one global batch of {self.global_batch}; lower --data.global-batch, or "
                "keep what is left over with --data.remainder pad"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        whole, rest = divmod(self.rows, self.global_batch)
        return whole + (self.remainder == "pad" and rest > 0)

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in a step."""
        return self.global_batch // (self.size * self.micro_batch)

    def global_rows(self, step: int) -> list[int]:
        """Return the indices of all rows of `step` (from 0), over all ranks."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch
        stop = min(start + self.global_batch, self.rows)
        if self.shuffle:
            rows = memoryview(_epoch_order(self.rows, self.seed + epoch)).cast("q")[start:stop].tolist()
        else:
            rows = list(range(start, stop))
        return rows + [PAD] * (self.global_batch - len(rows))

    def micro_batches(self, step: int) -> list[list[int]]:
        """Return this rank's rows of `step`, one list for each micro-batch."""
        share = self.global_batch // self.size
        mine = self.global_rows(step)[self.rank * share : (self.rank + 1) * share]
        return [mine[i : i + self.micro_batch] for i in range(0, share, self.micro_batch)]


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int) -> bytes:
    """Return a permutation as int64: eight bytes a row, where a list would take five times that."""
    return bytes(torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).numpy().tobytes())
