"""A frozen second model beside the trained one: what is learnt is pulled back to the start's log-probabilities."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import attrs
import torch

from femto_core import hookspecs
from femto_core.batch import Batch
from femto_core.build import LoadedStage, build_stage
from femto_core.data import Loader
from femto_core.hookspecs import hookimpl
from femto_core.trainer import Trainer

STRENGTH = 0.3


class ReferenceLoss:
    """Cross-entropy, and the squared distance of each target's log-probability from the reference's."""

    def __call__(self, statistics: Any, hidden: torch.Tensor, head: Any, batch: Batch) -> torch.Tensor:
        found = statistics.log_probs(hidden, head, batch.targets, entropy=True)
        distance = found.log_probs - batch.extra["reference"].flatten().to(found.log_probs)
        loss: torch.Tensor = STRENGTH * distance.square() - found.log_probs - 0.01 * found.entropy
        return loss.sum()

    def weight(self, batch: Batch) -> float:
        return batch.valid


class ReferenceLoader:
    """Adds the reference's log-probabilities [b, s] to another loader's micro-batches."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner
        self.trainer: Trainer
        self.reference: LoadedStage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next_step(self) -> Sequence[Batch]:
        return [self._with_reference(batch) for batch in self._inner.next_step()]

    def _with_reference(self, batch: Batch) -> Batch:
        targets = batch.targets.to(self.trainer.mesh.device)

        def log_probs(hidden: torch.Tensor, head: Any) -> torch.Tensor:
            found: torch.Tensor = self.trainer.statistics.log_probs(hidden, head, targets).log_probs
            return found.view_as(targets)

        values = self.reference.schedule.forward(self.reference.stage, batch, log_probs).cpu()
        return attrs.evolve(batch, extra={**batch.extra, "reference": values})


class Reference:
    """The plugin."""

    def __init__(self) -> None:
        self._loader: ReferenceLoader

    @hookimpl(wrapper=True)
    def femto_loader(self) -> Generator[None, Loader, ReferenceLoader]:
        self._loader = ReferenceLoader((yield))
        return self._loader

    @hookimpl
    def femto_loss(self) -> ReferenceLoss:
        return ReferenceLoss()

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        model = trainer.hooks.seat(hookspecs.femto_model, config=trainer.config)
        reference = build_stage(trainer.config, trainer.hooks, trainer.mesh, model=model, trainable=False)
        self._loader.trainer, self._loader.reference = trainer, reference

    @hookimpl
    def femto_train_end(self) -> None:
        self._loader.reference.close()
