"""Batch: what one micro-batch is, for the model, the schedule and the loss alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from femto_core.errors import UserError

IGNORE_INDEX = -100


@attrs.frozen(kw_only=True)
class Batch:
    """One micro-batch of `b` rows of `s` tokens; the model's own tensors are int64 [b, s].

    Raises `UserError` for an extra tensor whose first dimension is not b.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    """The token to predict at each place; `IGNORE_INDEX` where there is nothing to learn."""
    position_ids: torch.Tensor
    """A place's position in its document. Where positions restart, attention does not look back across."""
    extra: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """What a task needs beside these, by name: one value a row [b, ...] or one a token [b, s, ...].

    A tensor whose second dimension is s has one value a token, and is cut along the tokens like the rest."""

    def __attrs_post_init__(self) -> None:
        rows = self.input_ids.shape[0]
        for name, tensor in self.extra.items():
            if tensor.dim() < 1 or tensor.shape[0] != rows:
                raise UserError(
                    f"Batch.extra[{name!r}] has shape {list(tensor.shape)}, but its first dimension must be the "
                    f"batch's {rows} rows"
                )

    @property
    def valid(self) -> int:
        """Number of targets that count."""
        return int((self.targets != IGNORE_INDEX).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the copy from pinned memory runs beside computation."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory; torch's DataLoader calls this by name."""
        return self.map(torch.Tensor.pin_memory)

    def split(self, rows: int) -> list[Batch]:
        """Return the batch as micro-batches of `rows` rows each, in order; the last may have fewer."""
        count = self.input_ids.shape[0]
        return [self.map(lambda t, at=at: t[at : at + rows]) for at in range(0, count, rows)]  # type: ignore[misc]

    def tokens(self, places: torch.Tensor) -> Batch:
        """Return the batch with only the tokens at `places` (int64 [s'], in this order) of each row."""
        length = self.input_ids.shape[1]

        def select(tensor: torch.Tensor) -> torch.Tensor:
            has_tokens = tensor.dim() > 1 and tensor.shape[1] == length
            return tensor.index_select(1, places.to(tensor.device)) if has_tokens else tensor

        return self.map(select)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with `change(tensor)` in the place of each of its tensors, the extra ones included."""
        own = {name: change(getattr(self, name)) for name in ("input_ids", "targets", "position_ids")}
        return attrs.evolve(self, **own, extra={name: change(tensor) for name, tensor in self.extra.items()})


def plain_positions(rows: int, length: int) -> torch.Tensor:
    """Return position ids [rows, length] of rows that hold one document each."""
    return torch.arange(length).repeat(rows, 1)  # memory of its own for each row: pinning writes to it
