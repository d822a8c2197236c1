"""The collator: rows into a batch whose targets and positions end with each document."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from femto_core.batch import IGNORE_INDEX, Batch
from femto_sft.rows import Row


def collate(samples: Sequence[Row]) -> Batch:
    """Return a batch [b, s]. A place's target is the next token, if it is trained and of the same document."""
    return Batch(
        input_ids=torch.stack([row.ids for row in samples]),
        targets=torch.stack([_targets(row) for row in samples]),
        position_ids=torch.stack([_positions(row) for row in samples]),
    )


def _targets(row: Row) -> torch.Tensor:
    """Return the target of each place [s]."""
    targets = row.ids.masked_fill(~row.trained, IGNORE_INDEX).roll(-1)
    targets[_ends(row) - 1] = IGNORE_INDEX  # a document's last token does not predict the next document's first
    return targets


def _positions(row: Row) -> torch.Tensor:
    """Return each place's position in its own document [s]."""
    lengths = torch.tensor(row.lengths)
    return torch.arange(len(row.ids)) - torch.repeat_interleave(_ends(row) - lengths, lengths)


def _ends(row: Row) -> torch.Tensor:
    """Return the place behind each document's last token [documents]."""
    return torch.tensor(row.lengths).cumsum(0)
