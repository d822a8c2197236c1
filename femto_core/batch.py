"""Batch: what one micro-batch is, for the model, the schedule and the loss alike."""

from __future__ import annotations

import attrs
import torch

IGNORE_INDEX = -100


@attrs.frozen(kw_only=True)
class Batch:
    """One micro-batch of `b` rows of `s` tokens; all tensors are int64 [b, s]."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """The token to predict at each place; `IGNORE_INDEX` where there is nothing to learn."""
    position_ids: torch.Tensor
    """A place's position in its document. Where it restarts, attention does not look back across."""
    document_ids: torch.Tensor
    """Number of the document within the row, from 0."""

    @property
    def valid(self) -> int:
        """Number of targets that count."""
        return int((self.targets != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the copy from pinned memory runs beside computation."""
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            document_ids=self.document_ids.to(device, non_blocking=True),
        )

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's DataLoader calls this by name."""
        return Batch(
            input_ids=self.input_ids.pin_memory(),
            targets=self.targets.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            document_ids=self.document_ids.pin_memory(),
        )


def plain_positions(rows: int, length: int) -> torch.Tensor:
    """Return position ids [rows, length] of rows that hold one document each."""
    return torch.arange(length).repeat(rows, 1)  # memory of its own for each row: pinning writes to it
