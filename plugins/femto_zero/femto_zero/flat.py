"""Parameters end to end in one vector, of which every rank owns an equal share."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn

from femto_core.buckets import Packing
from femto_core.layout import ParamLayout
from femto_core.mesh import DP, Mesh
from femto_core.model import Stage
from femto_core.precision import MixedPrecisionManager, ParamGroup


@attrs.frozen
class Kind:
    """What parameters of one vector have in common."""

    dtype: torch.dtype
    partial: tuple[str, ...]
    """Mesh axes other than dp over which their gradients are partial sums."""
    trainable: bool


class FlatParameters:
    """Parameters of one kind, as views of one vector `whole` [ranks * n], and this rank's `share` [n] of it.

    The vector's memory can be dropped and filled again under the views, which autograd may have saved meanwhile: they
    see the storage, and the storage is the same. As long as it is full, `whole` equals every rank's share end to end.
    """

    def __init__(
        self, names: Sequence[str], stage: Stage, kind: Kind, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Give the stage's parameters `names` their memory, which has no values yet."""
        self.names, self.kind, self.group = tuple(names), kind, group
        metas = dict(stage.named_parameters())
        self.packing = Packing(tuple(metas[name].numel() for name in names), group.size())
        self.whole = torch.empty(self.packing.numel, dtype=kind.dtype, device=device)
        rank, length = group.rank(), self.packing.share_numel
        self.mine = self.whole[rank * length : (rank + 1) * length]
        """This rank's part of `whole`."""
        self.share = self.mine
        parts = zip(names, self.packing.cut(self.whole), strict=True)
        self.parameters = {
            name: nn.Parameter(part.view(metas[name].shape), requires_grad=kind.trainable) for name, part in parts
        }

    def keep_share_apart(self) -> None:
        """Give the share memory of its own, so that `whole` can be dropped."""
        self.share = torch.empty_like(self.mine)

    @property
    def nbytes(self) -> int:
        """Bytes of `whole` when it is there."""
        return self.whole.numel() * self.whole.element_size()

    def make_groups(self, layouts: dict[str, ParamLayout], precision: MixedPrecisionManager) -> dict[str, ParamGroup]:
        """Return for each parameter its group, which is this rank's share of it, possibly nothing."""
        rank = self.group.rank()
        owned, parts = self.packing.owned(rank), self.packing.cut_share(self.share, rank)
        groups = {}
        for name, (first, last), part in zip(self.names, owned, parts, strict=True):
            layout = layouts[name]
            layout = attrs.evolve(layout, flat=(first, last), replicated=layout.replicated - {DP})
            compute = nn.Parameter(part, requires_grad=self.kind.trainable)
            groups[name] = precision.make_group(name, compute, layout)
        return groups


def kinds_of(names: Sequence[str], stage: Stage, precision: MixedPrecisionManager, mesh: Mesh) -> dict[Kind, list[str]]:
    """Sort parameters by kind, each kind's in the order given."""
    parameters = dict(stage.named_parameters())
    found: dict[Kind, list[str]] = {}
    for name in names:
        partial = tuple(axis for axis in sorted(stage.layouts[name].partial) if axis != DP and mesh.size(axis) > 1)
        kind = Kind(precision.dtype_of(name, stage), partial, parameters[name].requires_grad)
        found.setdefault(kind, []).append(name)
    return found


def cut_by_size(names: Sequence[str], sizes: Sequence[int], limit: float) -> list[list[str]]:
    """Cut `names` into runs whose `sizes` add up to `limit` at most, one name at least in each."""
    runs: list[list[str]] = []
    total = 0
    for name, size in zip(names, sizes, strict=True):
        if not runs or total + size > limit:
            runs.append([])
            total = 0
        runs[-1].append(name)
        total += size
    return runs
