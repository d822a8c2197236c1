"""The collator: rows into a batch whose targets, positions and document numbers end with each document."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from femto_core.batch import IGNORE_INDEX, Batch
from femto_sft.rows import Row


def collate(samples: Sequence[Row]) -> Batch:
    """Make a batch [b, s]: a place's target is the next token of its own document, where that one is trained."""
    parts = [_documents(row) for row in samples]
    return Batch(
        input_ids=torch.stack([row.ids for row in samples]),
        targets=torch.stack([targets for targets, _, _ in parts]),
        position_ids=torch.stack([positions for _, positions, _ in parts]),
        document_ids=torch.stack([numbers for _, _, numbers in parts]),
    )


def _documents(row: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return targets, positions and document numbers [s] of one row."""
    lengths = torch.tensor(row.lengths)
    ends = lengths.cumsum(0)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.arange(len(row.ids)) - (ends - lengths)[numbers]
    targets = row.ids.masked_fill(~row.trained, IGNORE_INDEX).roll(-1)
    targets[ends - 1] = IGNORE_INDEX  # a document's last token predicts nothing, least of all the next one's first
    return targets, positions, numbers
