"""A tensor parallel group and its collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from femto_core.mesh import Mesh
from femto_ops import collectives
from femto_ops.collectives import Pending

TP = "tp"


class Ranks:
    """A tensor parallel group, seen from one of its ranks. All ranks of the group call each method together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()

    @classmethod
    def of(cls, mesh: Mesh) -> Ranks:
        """Return this rank's group along the mesh's axis tp."""
        return cls(mesh.group(TP))

    def start_sum(self, tensor: torch.Tensor) -> Pending:
        """Start to sum `tensor`, which must be contiguous, over the ranks in place."""
        return collectives.all_reduce(tensor, self.group)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks; a contiguous `tensor` is overwritten."""
        tensor = tensor.contiguous()
        self.start_sum(tensor).wait()
        return tensor

    def start_gather(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start to gather every rank's `tensor` [...], of equal shapes; return the result [size, ...]."""
        whole = tensor.new_empty(self.size, *tensor.shape)
        whole[self.rank] = tensor
        return whole, collectives.all_gather(whole.view(-1), self.group)

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return every rank's `tensor`, of equal shapes, concatenated along `dim`."""
        whole, pending = self.start_gather(tensor)
        pending.wait()
        return side_by_side(whole, dim)

    def start_scatter_sum(self, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, Pending]:
        """Start to reduce-scatter `tensor`; return this rank's equal part, along `dim`, of the sum over the ranks."""
        parts = torch.stack(tensor.chunk(self.size, dim)) if dim else tensor.contiguous()
        shape = list(tensor.shape)
        shape[dim] //= self.size
        mine = tensor.new_empty(shape)
        return mine, collectives.reduce_scatter(parts.view(-1), mine.view(-1), self.group)

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's equal part along `dim` of the sum of `tensor` over the ranks."""
        mine, pending = self.start_scatter_sum(tensor, dim)
        pending.wait()
        return mine

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's equal part of `tensor` along `dim`, a view."""
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)


def side_by_side(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate gathered tensors [size, ...] along `dim` (a dimension of each)."""
    return torch.cat(list(whole), dim) if dim else whole.flatten(0, 1)


def saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Return a context's saved tensors, typed."""
    tensors: tuple[torch.Tensor, ...] = ctx.saved_tensors
    return tensors
