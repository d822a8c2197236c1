"""A loader that makes its micro-batches from the policy: the skeleton of GRPO (Shao et al. 2024, arXiv:2402.03300).

Each step, the model answers prompts, several times each. A rule rewards the answers, and an answer's advantage is its
reward above the mean of its group. The loss raises the log-probability of what was better than its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from femto_core.batch import IGNORE_INDEX, Batch, plain_positions
from femto_core.config import Config
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.mesh import Mesh
from femto_core.trainer import Trainer

GROUP, PROMPT, END = 2, 3, 0
"""Answers to a prompt, tokens of a prompt, and the token that ends an answer."""


@attrs.frozen
class Prompts:
    """Row i is a prompt, decided by i."""

    vocab_size: int
    count: int
    tokenizer_path: Path = Path("none")
    fingerprint: str = "prompts"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1, self.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(index))


class RolloutLoader:
    """Answers the prompts of each step with the trainer's own stage; its whole state is the number of the step."""

    def __init__(self, config: Config, mesh: Mesh, prompts: Prompts) -> None:
        self._config, self._prompts = config, prompts
        self._share = config.data.global_batch // mesh.size(*mesh.row_axes)
        self._first = self._share * mesh.coordinate(*mesh.row_axes)
        self._step = 0
        self.trainer: Trainer

    @property
    def accumulation(self) -> int:
        return self._share // self._config.data.micro_batch

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"data": self._prompts.fingerprint, "train.seed": self._config.train.seed}

    def next_step(self) -> Sequence[Batch]:
        """Sample this rank's answers; every rank runs as many forward passes, however early its answers end."""
        length, numbers = self._config.data.seq_len, range(self._first, self._first + self._share)
        per_step = self._config.data.global_batch // GROUP
        prompts = [self._prompts[(self._step * per_step + n // GROUP) % len(self._prompts)] for n in numbers]
        chances = torch.stack([self._chances(number) for number in numbers])  # [rows, answer]
        rows = torch.full((self._share, length + 1), END)
        rows[:, :PROMPT] = torch.stack(prompts)
        with self.trainer.stage.evaluating():
            for place in range(PROMPT, length + 1):
                sums = self._probabilities(rows[:, :-1], place - 1).cumsum(-1)  # [rows, v]
                drawn = torch.searchsorted(sums, chances[:, place - PROMPT, None] * sums[:, -1:], right=True)
                ended = (rows[:, PROMPT:place] == END).any(1)
                rows[:, place] = drawn[:, 0].clamp(max=sums.shape[1] - 1).masked_fill(ended, END)
        self._step += 1
        return make_batch(rows).split(self._config.data.micro_batch)

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    def close(self) -> None:
        pass

    def _chances(self, number: int) -> torch.Tensor:
        """Return a number from [0, 1) for each token of a row's answer, the same in every layout."""
        seed = (self._config.train.seed * 1_000_003 + self._step) * 1_000_003 + number
        answer = self._config.data.seq_len + 1 - PROMPT
        return torch.rand(answer, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def _probabilities(self, tokens: torch.Tensor, place: int) -> torch.Tensor:
        """Return the probability [rows, v] of each token to follow the one at `place`."""
        trainer = self.trainer

        def read(hidden: torch.Tensor, head: Any) -> torch.Tensor:
            any_target = torch.zeros(len(tokens), 1, dtype=torch.int64, device=hidden.device)
            found = trainer.statistics.log_probs(
                hidden[:, place : place + 1], head, any_target, top=trainer.model_config.vocab_size
            )
            assert found.top_log_probs is not None
            assert found.top_ids is not None
            return torch.empty_like(found.top_log_probs).scatter_(1, found.top_ids, found.top_log_probs)

        batch = Batch(input_ids=tokens, targets=tokens, position_ids=plain_positions(*tokens.shape))
        return trainer.schedule.forward(trainer.stage, batch, read).double().exp().cpu()


def make_batch(rows: torch.Tensor) -> Batch:
    """Return the batch of prompts with answers [b, s + 1]; targets are the answers up to their end."""
    answers = rows[:, PROMPT:]
    counts = (answers == END).cumsum(1) - (answers == END).long() == 0  # up to the first END, which counts
    rewards = ((answers % 2 == 0) & counts).sum(1) / counts.sum(1).double()  # the share of even ids
    groups = rewards.view(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    targets = rows[:, 1:].clone()
    targets[:, PROMPT - 1 :].masked_fill_(~counts, IGNORE_INDEX)
    targets[:, : PROMPT - 1] = IGNORE_INDEX
    return Batch(
        input_ids=rows[:, :-1].contiguous(),
        targets=targets,
        position_ids=plain_positions(len(rows), rows.shape[1] - 1),
        extra={"advantages": advantages},
    )


class PolicyLoss:
    """-(advantage * log-probability), a mean over the answers' tokens."""

    def __call__(self, statistics: Any, hidden: torch.Tensor, head: Any, batch: Batch) -> torch.Tensor:
        log_probs = statistics.log_probs(hidden, head, batch.targets).log_probs.view_as(batch.targets)
        loss: torch.Tensor = -(batch.extra["advantages"].to(log_probs)[:, None] * log_probs).sum()
        return loss

    def weight(self, batch: Batch) -> float:
        return batch.valid


class Rollouts:
    """The plugin."""

    def __init__(self) -> None:
        self._loader: RolloutLoader

    @hookimpl
    def femto_dataset(self, config: Config, split: str) -> Prompts:
        return Prompts(config.model.vocab_size, {"train": 16, "held_out": 0}[split])

    @hookimpl
    def femto_loader(self, config: Config, mesh: Mesh, dataset: Prompts) -> RolloutLoader:
        if mesh.size(*mesh.token_axes) > 1:
            raise UserError("rollouts are sampled from whole rows, which this mesh splits; remove the token axis")
        rows = mesh.size(*mesh.row_axes) * config.data.micro_batch
        if config.data.micro_batch % GROUP or config.data.global_batch % rows:
            raise UserError(
                f"data.micro_batch = {config.data.micro_batch} must be a multiple of {GROUP}, the answers to a prompt, "
                f"and divide data.global_batch = {config.data.global_batch} on every rank"
            )
        self._loader = RolloutLoader(config, mesh, dataset)
        return self._loader

    @hookimpl
    def femto_loss(self) -> PolicyLoss:
        return PolicyLoss()

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        self._loader.trainer = trainer
