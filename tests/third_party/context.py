"""Context parallelism in its smallest form: rows cut in equal parts along the sequence, keys and values gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from femto_core.batch import Batch
from femto_core.config import Config
from femto_core.data import TokenSplit, split_evenly
from femto_core.hookspecs import hookimpl
from femto_core.mesh import Axis, Mesh
from femto_core.model import Stage

NAME = "context_gather"


@attrs.frozen(kw_only=True)
class ContextSection:
    """Rows cut along the sequence."""

    size: int = 2
    """Ranks of a row."""


@attrs.frozen
class Context:
    """What attention needs to know of a cut row."""

    group: dist.ProcessGroup
    rank: int
    positions: torch.Tensor
    """Position ids [b, s] of the whole rows."""


class ContextParallelism:
    """The plugin."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[ContextSection]]:
        return "context", ContextSection

    @hookimpl
    def femto_mesh_axes(self, config: Config) -> Sequence[Axis]:
        return [Axis("cp", config.section(ContextSection).size, 60, "tokens")]

    @hookimpl
    def femto_split_tokens(self, config: Config, mesh: Mesh) -> TokenSplit:
        cut = split_evenly(config, mesh)

        def split(batch: Batch) -> Batch:
            part = cut(batch)
            whole = batch.position_ids[:, None]  # [b, 1, s]: one value a row, so that nobody cuts it
            return attrs.evolve(part, extra={**part.extra, "whole_positions": whole})

        return split

    @hookimpl
    def femto_parallelize(self, stage: Stage, mesh: Mesh) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)
        stage.body.config._attn_implementation = NAME
        group, rank = mesh.group("cp"), mesh.coordinate("cp")

        def inputs(batch: Batch) -> Mapping[str, Any]:
            whole = batch.extra.get("whole_positions")  # absent where a batch was not cut: a sample's prompt
            if whole is None:
                return {"context": Context(group, 0, batch.position_ids)}
            return {"context": Context(group, rank, whole[:, 0])}

        stage.body_inputs = inputs


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    context: Context,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents: query [b, heads, s of this rank, d] over the keys and values of whole rows."""
    length, total = query.shape[2], context.positions.shape[1]
    if length < total:
        key, value = (GatherTokens.apply(t, context.group) for t in (key, value))  # type: ignore[no-untyped-call]
    starts = F.pad(context.positions.diff(dim=1) != 1, (1, 0))
    documents = starts.cumsum(1)  # [b, s]
    places = torch.arange(total, device=query.device)
    mine = slice(context.rank * length, (context.rank + 1) * length)
    visible = (documents[:, mine, None] == documents[:, None]) & (places[mine, None] >= places[None])  # [b, s, total]
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], scale=scaling)
    return output.transpose(1, 2), None


class GatherTokens(torch.autograd.Function):
    """All-gather along the sequence; backward sums the ranks' gradients of each part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=2)[ctx.group.rank()].contiguous(), None
