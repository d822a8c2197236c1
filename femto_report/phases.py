"""Peak memory of a training step by phase: forward, backward, update."""

from __future__ import annotations

import attrs
import torch

from femto_core.trainer import Trainer
from femto_ops.memory import ByteCounter


@attrs.frozen
class Phase:
    """Memory of one phase, in bytes."""

    name: str
    peak: int
    after: int
    """What is left at its end."""


def measure_step(trainer: Trainer, counter: ByteCounter) -> list[Phase]:
    """Return the phases of a step that is not the first: the optimizer has its state. Values may be NaN.

    With several micro-batches, forward and backward are those with the highest peak.
    """
    found: dict[str, Phase] = {}
    current = "forward"

    def enter(name: str) -> None:
        nonlocal current
        peak = max(counter.take_peak(), found[current].peak if current in found else 0)
        found[current] = Phase(current, peak, counter.live())
        current = name

    def loss(hidden: torch.Tensor, head: torch.nn.Module, targets: torch.Tensor) -> torch.Tensor:
        enter("forward")  # on the pipeline's stage that has a head, the loss is part of it
        result = trainer.loss(hidden, head, targets)
        enter("backward")
        return result

    scale = torch.ones((), dtype=torch.float64, device=trainer.mesh.device)
    body = trainer.stage.body
    handles = [
        body.register_forward_pre_hook(lambda *_: enter("forward")),
        body.register_forward_hook(lambda *_: enter("backward")),
    ]
    for _ in range(2):
        counter.take_peak()
        found.clear()
        current = "forward"
        micro_batches = trainer.loader.next_step()
        trainer.schedule.run(trainer.stage, micro_batches, loss, scale, trainer.grad_sync)
        trainer.grad_sync.sync_gradients()
        trainer.sharding.reduce_grads()
        enter("update")
        trainer.update(1.0)
        trainer.sharding.gather_weights()
        trainer.precision.zero_grad(trainer.groups)
        trainer.sharding.post_step()
        enter("forward")
    for handle in handles:
        handle.remove()
    return [found[name] for name in ("forward", "backward", "update")]
