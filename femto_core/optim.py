"""AdamW, the learning-rate schedules, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import get_scheduler

from femto_core.mesh import Mesh
from femto_core.precision import ParamGroup
from femto_core.sections import OptimSection


class LRSchedule(Protocol):
    """A pure function of the step, so that resuming needs no state."""

    def __call__(self, step: int) -> float:
        """Return the factor on the peak learning rate for the update number `step`, counted from 0."""


def make_adamw(groups: Sequence[ParamGroup], section: OptimSection) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) over the masters; weight decay on matrices only, in one fused pass."""
    matrices = [g.master for g in groups if len(g.layout.global_shape) > 1]
    vectors = [g.master for g in groups if len(g.layout.global_shape) <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def make_lr_schedule(section: OptimSection, steps: int) -> LRSchedule:
    """Return transformers' schedule of that name over `steps` updates.

    It is evaluated one step ahead, over one step more, so that neither the first update nor the last is at zero.
    """
    warmup = section.warmup + 1
    total = max(steps + 1, warmup + 1)
    decay = min(section.decay or max(1, steps // 5), total - warmup)
    shapes: dict[str, tuple[str, dict[str, float]]] = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": section.min_ratio}),
        "linear": ("linear", {}),
        "constant": ("constant_with_warmup", {}),
        "wsd": ("warmup_stable_decay", {"num_decay_steps": decay, "min_lr_ratio": section.min_ratio}),
    }
    name, extra = shapes[section.schedule]
    # transformers offers its schedules only attached to an optimizer; this one is a stand-in that never steps.
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler: Any = get_scheduler(
        name, stand_in, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=extra
    )
    factor = scheduler.lr_lambdas[0]
    floor = section.min_ratio if section.schedule == "linear" else 0.0
    # The rise is our own, since transformers' wsd begins its own at min_ratio.
    return lambda step: (step + 1) / warmup if step < warmup else max(floor, float(factor(step + 1)))


def grad_norm_squared(groups: Sequence[ParamGroup], mesh: Mesh) -> torch.Tensor:
    """Return this rank's part of the squared global gradient norm (float64 scalar); the world's sum is the whole.

    Every element of every parameter counts exactly once: what is replicated, on its first rank only.
    """
    grads = [g.compute.grad for g in groups if g.compute.grad is not None and g.layout.counts_on(mesh)]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    # In float64, so that the norm, and what clipping makes of it, does not depend on how gradients are cut.
    if mesh.device.type == "cpu":
        return _squares_on_cpu(grads)
    norms: list[torch.Tensor] = []
    for dtype in {grad.dtype for grad in grads}:
        norms.extend(torch._foreach_norm([grad for grad in grads if grad.dtype == dtype], dtype=torch.float64))
    return torch.stack(norms).square().sum()


def _squares_on_cpu(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up squares in float64, a block that a cache holds at a time: 4 times as fast there as torch's wide norm."""
    wide = torch.empty(2**18, dtype=torch.float64)
    blocks = [block for grad in grads for block in torch.split(grad.reshape(-1), wide.numel())]
    sums = []
    for block in blocks:
        part = wide[: block.numel()].copy_(block)
        sums.append(torch.dot(part, part))
    return torch.stack(sums).sum()


def clip_grads(groups: Sequence[ParamGroup], norm: float, limit: float) -> None:
    """Scale all gradients by limit / norm where the global `norm` exceeds `limit`; a limit of 0 means none."""
    grads = [g.master.grad for g in groups if g.master.grad is not None]
    if grads and limit and norm > limit:
        torch._foreach_mul_(grads, limit / norm)


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each parameter group to `factor` times the one it was made with, its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
