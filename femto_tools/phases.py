"""Peak memory of a training step by phase: forward, backward, update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import torch
from torch import nn

from femto_core.batch import Batch
from femto_core.trainer import Trainer
from femto_ops.memory import ByteCounter

PHASES = ("forward", "backward", "update")


@attrs.frozen
class Phase:
    """Memory of one phase, in bytes."""

    name: str
    peak: int
    after: int
    """Bytes alive at the end of the phase."""


def measure_step(trainer: Trainer, counter: ByteCounter) -> list[Phase]:
    """Return the phases of the trainer's second step, when the optimizer has its state. Values may be NaN.

    Of several micro-batches, forward and backward are the ones with the highest peak.
    """
    weight = torch.ones((), dtype=torch.float64, device=trainer.mesh.device)
    clock = PhaseClock(counter)
    with clock.watching(trainer):
        for _ in range(2):
            clock.restart()
            trainer.forward_backward(trainer.loader.next_step(), weight)
            clock.enter("update")
            trainer.update(norm=1.0, lr_factor=1.0)
            trainer.end_step()
            clock.enter("forward")
    return [clock.phases[name] for name in PHASES]


class PhaseClock:
    """Notes the peak of each phase as the next one begins."""

    def __init__(self, counter: ByteCounter) -> None:
        self._counter, self._current = counter, "forward"
        self.phases: dict[str, Phase] = {}

    def restart(self) -> None:
        """Forget all phases; forward begins."""
        self._counter.take_peak()
        self.phases, self._current = {}, "forward"

    def enter(self, name: str) -> None:
        """End the current phase and begin the phase `name`."""
        before = self.phases.get(self._current)
        peak = max(self._counter.take_peak(), before.peak if before else 0)
        self.phases[self._current] = Phase(self._current, peak, self._counter.live())
        self._current = name

    @contextlib.contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Inside, enter forward and backward as the trainer's model and loss do."""
        real_loss, body = trainer.loss, trainer.stage.body

        def loss(hidden: torch.Tensor, head: nn.Module, batch: Batch) -> torch.Tensor:
            self.enter("forward")  # on the stage that has the head, the loss is part of forward
            result = real_loss(hidden, head, batch)
            self.enter("backward")
            return result

        handles = [
            body.register_forward_pre_hook(lambda *_: self.enter("forward")),
            body.register_forward_hook(lambda *_: self.enter("backward")),
        ]
        trainer.loss = loss
        try:
            yield
        finally:
            trainer.loss = real_loss
            for handle in handles:
                handle.remove()
