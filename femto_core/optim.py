"""AdamW and the learning-rate schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import get_scheduler

from femto_core.precision import ParamShare
from femto_core.sections import OptimSection


class LRSchedule(Protocol):
    """A pure function of the step, so that resuming needs no state."""

    def __call__(self, step: int) -> float:
        """Return the factor on the peak learning rate for the update number `step`, counted from 0."""


def make_adamw(shares: Sequence[ParamShare], section: OptimSection) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) over the masters; weight decay on matrices only, in one fused pass."""
    owned = [share for share in shares if share.master.numel()]
    matrices = [share.master for share in owned if len(share.layout.global_shape) > 1]
    vectors = [share.master for share in owned if len(share.layout.global_shape) <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def make_lr_schedule(section: OptimSection, steps: int) -> LRSchedule:
    """Return transformers' schedule of that name over `steps` updates.

    The schedule is evaluated one step ahead, so that the first update is not at 0 and the last is at `min_ratio`. Where
    that is 0, it goes over one step more, so that the last is not at 0 either.
    """
    warmup = section.warmup + 1
    falls_to_zero = section.min_ratio == 0 or section.schedule == "linear"
    total = max(steps + falls_to_zero, warmup + 1)
    decay = min(section.decay or max(1, steps // 5), total - warmup)
    shapes: dict[str, tuple[str, dict[str, float]]] = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": section.min_ratio}),
        "linear": ("linear", {}),
        "constant": ("constant_with_warmup", {}),
        "wsd": ("warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": section.min_ratio}),
    }
    name, extra = shapes[section.schedule]
    # transformers offers schedules only attached to an optimizer; this optimizer is a stand-in that never steps.
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: Any = get_scheduler(
        name, stand_in, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=extra
    )
    factor = scheduler.lr_lambdas[0]
    floor = section.min_ratio if section.schedule == "linear" else 0.0
    # Warm-up is computed here, since transformers' wsd begins its own at min_ratio.
    return lambda step: (step + 1) / warmup if step < warmup else max(floor, float(factor(step + 1)))


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each parameter group to `factor` times the one it was made with, its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
