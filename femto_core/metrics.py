"""The numbers of a step, its speed, and its memory."""

from __future__ import annotations

import time

import attrs
import torch

from femto_ops.memory import peak_memory_mib


@attrs.frozen(kw_only=True)
class StepInfo:
    """One optimizer step; equal on all ranks, except `seconds`."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Loss before the update, divided by the batch's weight: a mean over valid targets. NaN where the weight is 0."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """`optim.lr` times the schedule's factor; parameter groups with another peak follow the same factor."""
    tokens: int
    """Valid targets of the global batch."""
    skipped: bool
    """Whether the weights are untouched: the gradient was not finite, or there was nothing to learn."""
    skipped_total: int
    seconds: float


@attrs.define
class Meter:
    """Turns steps into tokens per second, TFLOP/s and memory."""

    flops_per_token: float
    tokens_per_step: int
    """Tokens of a global batch, including those without a target, which are computed all the same."""
    world_size: int
    device: torch.device
    peak_tflops: float
    _started: float = attrs.field(factory=time.perf_counter, init=False)

    def start(self) -> None:
        """Start the clock of a step."""
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since `start`.

        Reading a step's loss has waited for forward and backward. On a GPU the update may still run, and then counts
        towards the next step.
        """
        return time.perf_counter() - self._started

    def rates(self, seconds: float) -> dict[str, float]:
        """Return the metrics of a step that took `seconds`: over all ranks, TFLOP/s and MFU per rank."""
        tflops = self.flops_per_token * self.tokens_per_step / seconds / self.world_size / 1e12
        rates = {
            "tokens_per_s": self.tokens_per_step / seconds,
            "tflops": tflops,
            "peak_memory_mib": peak_memory_mib(self.device),
        }
        if self.peak_tflops:
            rates["mfu"] = tflops / self.peak_tflops
        return rates
