"""Experts in place of each MLP, every token weighing all of them; and expert parallelism, one expert a rank.

The ranks of the axis `ep` read different rows. Each gathers the tokens of all, lets its own expert compute, and sums
the results back to where the tokens came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from femto_core.config import Config
from femto_core.hookspecs import hookimpl
from femto_core.layout import Box
from femto_core.mesh import Axis, Mesh
from femto_core.model import FullModel, Stage
from tests.third_party.seeded import SeededWeights

EXPERTS, BALANCE = 2, 0.01


class DenseExperts(nn.Module):
    """The experts' outputs, weighted by a softmax over the gate's logits."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False, device="meta")
        self.up = nn.Parameter(torch.empty(EXPERTS, inner, width, device="meta"))
        self.down = nn.Parameter(torch.empty(EXPERTS, width, inner, device="meta"))
        self.side_losses: Any = None
        self.group: dist.ProcessGroup | None = None
        """The ranks that hold the other experts; None where this rank holds all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        weights = self.gate(x).softmax(-1)  # [b, s, experts]
        self.side_losses.add(BALANCE * EXPERTS * weights.double().square().sum())  # least where all weigh alike
        if self.group is None:
            outputs = torch.stack([self.expert(x, number) for number in range(EXPERTS)], -1)
            total: torch.Tensor = (outputs * weights[..., None, :]).sum(-1)
            return total
        tokens, weights = (GatherRows.apply(t, self.group) for t in (x, weights))  # type: ignore[no-untyped-call]
        mine = weights[..., self.group.rank(), None] * self.expert(tokens, 0)
        result: torch.Tensor = SumRows.apply(mine, self.group)  # type: ignore[no-untyped-call]
        return result

    def expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return what one of this rank's experts makes of `x` [..., h]."""
        return F.linear(F.silu(F.linear(x, self.up[number])), self.down[number])


class Experts:
    """The plugin that changes the model."""

    @hookimpl
    def femto_transform_model(self, model: FullModel, config: Config) -> None:
        for layer in model.module.model.layers:
            layer.mlp = DenseExperts(model.config.hidden_size, model.config.intermediate_size)
        added = {name: tuple(p.shape) for name, p in model.module.named_parameters() if ".mlp." in name}
        model.weights = SeededWeights(model.weights, added, config.train.seed)


class ExpertParallelism:
    """The plugin that lays the experts out."""

    @hookimpl
    def femto_mesh_axes(self) -> Sequence[Axis]:
        return [Axis("ep", EXPERTS, 60, "rows")]

    @hookimpl
    def femto_parallelize(self, stage: Stage, mesh: Mesh) -> None:
        for name, module in stage.module.named_modules():
            if isinstance(module, DenseExperts):
                module.group = mesh.group("ep")
                for key in ("up", "down"):
                    whole = getattr(module, key)
                    setattr(module, key, nn.Parameter(whole[:1], whole.requires_grad))
                    layout = stage.layouts[f"{name}.{key}"]
                    stage.layouts[f"{name}.{key}"] = attrs.evolve(
                        layout,
                        box=Box((mesh.coordinate("ep"), 0, 0), (1, *whole.shape[1:])),
                        flat=(0, whole[0].numel()),
                        partial=layout.partial - {"ep"},  # the expert sees the tokens of all ranks along ep
                        replicated=layout.replicated - {"ep"},
                        cut=layout.cut | {"ep"},
                    )


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ranks' `part` [b, ...] below one another: [ranks * b, ...]."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def sum_back(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows [b, ...] of the sum of the ranks' `whole` [ranks * b, ...]."""
    total = whole.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].contiguous()


class GatherRows(torch.autograd.Function):
    """`gather`; backward is `sum_back`."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return gather(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_back(grad, ctx.group), None


class SumRows(torch.autograd.Function):
    """`sum_back`; backward is `gather`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return sum_back(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather(grad, ctx.group), None
