"""Which rows a rank reads at which step, and how they become batches.

The order of rows depends on seed, epoch and global batch only. A step's rows are a pure function of its number, so
resuming a run means asking for the next number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import torch
from torch.utils.data import DataLoader

from femto_core.batch import IGNORE_INDEX, Batch, plain_positions
from femto_core.errors import UserError

PAD = -1  # in place of a row's index: a row that fills the batch and carries no loss


class Dataset(Protocol):
    """Rows looked up by index; stateless, and picklable for loader processes."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that the rows are written in."""

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the tokenizer that wrote the rows."""

    @property
    def fingerprint(self) -> str:
        """What tells these rows from others: a run resumes only on the rows it was trained on."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Collator(Protocol):
    """Turns samples of the dataset into one micro-batch, whose row i is sample i."""

    def __call__(self, samples: Sequence[Any]) -> Batch: ...


def next_token_collator(samples: Sequence[torch.Tensor]) -> Batch:
    """Make a batch [b, s] of packed rows [s + 1]: each token's target is the one after it, across documents too."""
    rows = torch.stack(list(samples))  # [b, s + 1]
    count, length = rows.shape[0], rows.shape[1] - 1
    return Batch(
        input_ids=rows[:, :-1].contiguous(),
        targets=rows[:, 1:].contiguous(),
        position_ids=plain_positions(count, length),
        document_ids=torch.zeros(count, length, dtype=torch.int64),
    )


@attrs.frozen(kw_only=True)
class DistributedSampler:
    """Deals the rows of each global batch out to the dp ranks, and each rank's share into micro-batches.

    `remainder` says what becomes of the rows at an epoch's end that fill no global batch: "drop" leaves them out,
    "pad" makes a last batch of them, filled up with `PAD`.
    """

    rows: int
    global_batch: int
    micro_batch: int
    dp_size: int
    dp_rank: int
    seed: int
    shuffle: bool
    remainder: Literal["drop", "pad"]

    def __attrs_post_init__(self) -> None:
        if self.global_batch % (self.dp_size * self.micro_batch):
            raise UserError(
                f"data.global_batch = {self.global_batch} is not a multiple of {self.dp_size} data-parallel ranks x "
                f"data.micro_batch = {self.micro_batch}"
            )
        if self.rows < self.dp_size:
            raise UserError(f"{self.rows} rows are too few for {self.dp_size} data-parallel ranks; use fewer processes")
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
        return self.global_batch // (self.dp_size * self.micro_batch)

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
        share = self.global_batch // self.dp_size
        mine = self.global_rows(step)[self.dp_rank * share : (self.dp_rank + 1) * share]
        return [mine[i : i + self.micro_batch] for i in range(0, share, self.micro_batch)]


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int) -> bytes:
    """Return a permutation as int64: eight bytes a row, where a list would take five times that."""
    return bytes(torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).numpy().tobytes())


class DistributedDataLoader:
    """Gives each step its micro-batches; its whole state is the number of the next step.

    `prefetch` is how many micro-batches each of the `workers` has ready. Neither it, nor the number of workers, nor
    pinning changes what a step gets. Whether workers persist from one epoch to the next is not asked: the iterator
    never ends, so they live until `close`.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: DistributedSampler,
        collator: Collator,
        *,
        workers: int,
        pin_memory: bool,
        prefetch: int = 2,
    ) -> None:
        self.sampler = sampler
        self._dataset, self._collator, self._workers, self._pin = dataset, collator, workers, pin_memory
        self._prefetch = prefetch
        self._step = 0
        self._iterator: Iterator[Batch] = iter(())
        self._started = False

    def next_step(self) -> list[Batch]:
        """Return the next step's micro-batches of this rank, on the CPU."""
        if not self._started:
            self._iterator, self._started = self._start(), True
        batches = [next(self._iterator) for _ in range(self.sampler.accumulation)]
        self._step += 1
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps given out so far."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after `state["step"]` steps."""
        self._step = state["step"]
        self.close()

    def close(self) -> None:
        """End the loader processes."""
        self._iterator, self._started = iter(()), False

    def _start(self) -> Iterator[Batch]:
        # The generator is given so that starting the iterator draws nothing from torch's global one.
        loader: DataLoader[Any] = DataLoader(
            _Rows(self._dataset),
            batch_sampler=_Endless(self.sampler, self._step),
            collate_fn=functools.partial(_collate, self._collator),
            num_workers=self._workers,
            prefetch_factor=self._prefetch if self._workers else None,
            pin_memory=self._pin,
            generator=torch.Generator().manual_seed(self.sampler.seed),
        )
        return iter(loader)


def evaluation_batches(
    dataset: Dataset, collator: Collator, *, rows: int, micro_batch: int, dp_size: int, dp_rank: int
) -> Iterator[Batch]:
    """Yield this rank's batches of the first `rows` rows: as many on every rank, the last ones filled with `PAD`."""
    padded = -(-rows // (dp_size * micro_batch)) * dp_size * micro_batch
    indices = [*range(rows), *[PAD] * (padded - rows)][dp_rank::dp_size]
    view = _Rows(dataset)
    for start in range(0, len(indices), micro_batch):
        yield _collate(collator, [view[i] for i in indices[start : start + micro_batch]])


class _Endless:
    """Micro-batches of row indices from a step on, epoch after epoch."""

    def __init__(self, sampler: DistributedSampler, step: int) -> None:
        self._sampler, self._step = sampler, step

    def __iter__(self) -> Iterator[list[int]]:
        step = self._step
        while True:
            yield from self._sampler.micro_batches(step)
            step += 1


class _Rows(torch.utils.data.Dataset[tuple[int, Any]]):
    """Pairs each sample with its index, so that collation knows which rows only fill up."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[max(index, 0)]


def _collate(collator: Collator, pairs: Sequence[tuple[int, Any]]) -> Batch:
    batch = collator([sample for _, sample in pairs])
    filling = torch.tensor([index == PAD for index, _ in pairs])
    if not filling.any():
        return batch
    return attrs.evolve(batch, targets=batch.targets.masked_fill(filling[:, None], IGNORE_INDEX))
