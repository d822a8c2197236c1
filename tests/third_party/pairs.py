"""A preference loss over pairs of rows, each token with a weight of its own: data, collator and loss seats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl


@attrs.frozen
class PairRows:
    """Sample i is a pair, decided by i and the split: chosen and rejected row, with a weight for each token."""

    seq_len: int
    vocab_size: int
    seed: int
    tokenizer_path: Path = Path("none")

    @property
    def fingerprint(self) -> str:
        return f"pairs {self.seed}"

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        rows = torch.randint(self.vocab_size, (2, self.seq_len + 1), generator=generator)
        hidden = torch.rand(2, self.seq_len, generator=generator) < 0.3
        return Batch(
            input_ids=rows[:, :-1],
            targets=rows[:, 1:].masked_fill(hidden, IGNORE_INDEX),
            position_ids=torch.arange(self.seq_len).repeat(2, 1),
            extra={"weights": torch.rand(2, self.seq_len, generator=generator, dtype=torch.float64)},
        )


class PairLoss:
    """-log sigmoid(chosen - rejected), of the weighted sums of token log-probabilities; a mean over pairs."""

    def __call__(self, statistics: Any, hidden: torch.Tensor, head: Any, batch: Batch) -> torch.Tensor:
        log_probs = statistics.log_probs(hidden, head, batch.targets).log_probs.view_as(batch.targets)
        scores = (log_probs * batch.extra["weights"].to(log_probs)).sum(1).view(-1, 2)  # [pairs, (chosen, rejected)]
        counts = (batch.targets != IGNORE_INDEX).any(1).view(-1, 2).all(1)
        return -(F.logsigmoid(scores[:, 0] - scores[:, 1]) * counts).sum()

    def weight(self, batch: Batch) -> float:
        """Pairs with something to learn in both rows."""
        return int((batch.targets != IGNORE_INDEX).any(1).view(-1, 2).all(1).sum())


class Pairs:
    """The plugin."""

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> PairRows:
        return PairRows(config.data.seq_len, config.model.vocab_size, {"train": 0, "held_out": 1}[split])

    @hookimpl
    def femto_collator(self) -> Any:
        return stack_pairs

    @hookimpl
    def femto_loss(self, mesh: Any) -> PairLoss:
        if mesh.size(*mesh.token_axes) > 1:
            raise UserError(
                "a pair's score is a sum over its whole rows, which this mesh splits; remove the token axis"
            )
        return PairLoss()


def stack_pairs(samples: Sequence[Batch]) -> Batch:
    """Put pairs below one another: rows 2i and 2i + 1 are sample i."""
    return Batch(
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        targets=torch.cat([sample.targets for sample in samples]),
        position_ids=torch.cat([sample.position_ids for sample in samples]),
        extra={"weights": torch.cat([sample.extra["weights"] for sample in samples])},
    )
