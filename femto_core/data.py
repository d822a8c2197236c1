"""How rows become batches: dataset, collator, and the loader seat, which makes a step's micro-batches.

A step's rows are a pure function of its number in the default loader, so resuming a run means asking for the next
number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch.utils.data import DataLoader

from femto_core.batch import IGNORE_INDEX, Batch, plain_positions
from femto_core.config import Config
from femto_core.errors import UserError
from femto_core.mesh import Mesh
from femto_core.sampler import PAD, DistributedSampler

TokenSplit = Callable[[Batch], Batch]
"""From a batch of whole rows to this rank's part of their tokens."""


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
        """Identifies these rows: a run resumes only on the rows that it was trained on."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Collator(Protocol):
    """Turns samples of the dataset into one micro-batch: equally many rows of each sample, in the samples' order."""

    def __call__(self, samples: Sequence[Any]) -> Batch: ...


class Loader(Protocol):
    """Makes the micro-batches of each step, the same on all ranks that see the same rows."""

    @property
    def accumulation(self) -> int:
        """The most micro-batches that a step has on one rank."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Plain values that a resumed run must have in common with the run that it continues."""

    def next_step(self) -> Sequence[Batch]:
        """Return the next step's micro-batches of this rank, on the CPU, tokens already split; as many on every rank.

        Called by all ranks alike, so collectives are allowed.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return what the next call of `next_step` depends on: plain values and tensors, equal on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""

    def close(self) -> None:
        """End what runs beside the steps."""


def next_token_collator(samples: Sequence[torch.Tensor]) -> Batch:
    """Make a batch [b, s] of packed rows [s + 1]: each token's target is the next token, across documents too."""
    rows = torch.stack(list(samples))  # [b, s + 1]
    count, length = rows.shape[0], rows.shape[1] - 1
    return Batch(
        input_ids=rows[:, :-1].contiguous(),
        targets=rows[:, 1:].contiguous(),
        position_ids=plain_positions(count, length),
    )


def split_evenly(config: Config, mesh: Mesh) -> TokenSplit:
    """Return the default split: consecutive, equal parts of each row over the mesh's token axes.

    Raises `UserError` where the rows do not divide.
    """
    size, part, length = mesh.size(*mesh.token_axes), mesh.coordinate(*mesh.token_axes), config.data.seq_len
    if length % size:
        raise UserError(
            f"data.seq_len = {length} does not divide into {size} equal parts (mesh axis "
            f"{', '.join(mesh.token_axes)}); set --data.seq-len to a multiple"
        )
    if size == 1:
        return _whole_rows
    return functools.partial(_part_of_tokens, size, part)


def _whole_rows(batch: Batch) -> Batch:
    return batch


def _part_of_tokens(size: int, part: int, batch: Batch) -> Batch:
    length = batch.input_ids.shape[1] // size
    return batch.tokens(torch.arange(part * length, (part + 1) * length))


def collate_and_split(collate: Collator, split: TokenSplit, samples: Sequence[Any]) -> Batch:
    """Return the batch that a collator makes, with only this rank's part of the tokens."""
    return split(collate(samples))


class DistributedDataLoader:
    """Takes the loader seat by default; its whole state is the number of the next step.

    `prefetch` is how many micro-batches each of the `workers` has ready. Neither `prefetch`, nor the number of workers,
    nor pinning changes what a step gets. The iterator never ends, so workers live until `close`.
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

    @property
    def accumulation(self) -> int:
        return self.sampler.accumulation

    @property
    def identity(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            "data": self._dataset.fingerprint,
            "data.rows": sampler.rows,
            "data.global_batch": sampler.global_batch,
            "data.remainder": sampler.remainder,
            "data.shuffle": sampler.shuffle,
            "train.seed": sampler.seed,
        }

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
        """Continue after `state["step"]` steps."""
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


def make_loader(config: Config, mesh: Mesh, dataset: Dataset, collator: Collator) -> DistributedDataLoader:
    """Return the default loader, for this rank's place among the ranks that read different rows."""
    section = config.data
    sampler = DistributedSampler(
        rows=len(dataset),
        global_batch=section.global_batch,
        micro_batch=section.micro_batch,
        size=mesh.size(*mesh.row_axes),
        rank=mesh.coordinate(*mesh.row_axes),
        seed=config.train.seed,
        shuffle=section.shuffle,
        remainder=section.remainder,
    )
    return DistributedDataLoader(
        dataset,
        sampler,
        collator,
        workers=section.workers,
        pin_memory=mesh.device.type == "cuda",
        prefetch=section.prefetch,
    )


def evaluation_batches(
    dataset: Dataset, collator: Collator, *, rows: int, micro_batch: int, size: int, rank: int
) -> Iterator[Batch]:
    """Yield the batches of the first `rows` rows that are `rank`'s of `size`; every rank gets equally many.

    Batches are padded with rows that carry no loss.
    """
    padded = -(-rows // (size * micro_batch)) * size * micro_batch
    indices = [*range(rows), *[PAD] * (padded - rows)][rank::size]
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
    """Pairs each sample with its index, so that collation knows which rows are padding."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[max(index, 0)]


def _collate(collator: Collator, pairs: Sequence[tuple[int, Any]]) -> Batch:
    batch = collator([sample for _, sample in pairs])
    padding = torch.tensor([index == PAD for index, _ in pairs])
    if not padding.any():
        return batch
    rows = padding.repeat_interleave(len(batch.targets) // len(pairs))  # a sample may have several: a pair's two
    return attrs.evolve(batch, targets=batch.targets.masked_fill(rows[:, None], IGNORE_INDEX))
