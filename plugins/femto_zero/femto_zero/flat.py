"""Parameters laid end to end in one vector, of which every rank owns an equal share."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import nn

from femto_core.buckets import FlatLayout
from femto_core.errors import UserError
from femto_core.layout import ParamLayout
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.precision import ParamShare, Precision


@attrs.frozen
class Kind:
    """What parameters of one vector have in common."""

    dtype: torch.dtype
    axes: tuple[str, ...]
    """Mesh axes over whose ranks the vector is sharded."""
    partial: tuple[str, ...]
    """Further mesh axes over which their gradients are partial sums."""
    trainable: bool


class FlatParameters:
    """Parameters of one kind, as views of one vector `whole` [ranks * n], and this rank's `share` [n] of it.

    The vector's memory can be dropped and filled again under its views. Views that autograd has saved keep the storage,
    and the storage stays the same object. While it is full, `whole` is every rank's share end to end.
    """

    def __init__(self, names: Sequence[str], stage: Stage, kind: Kind, mesh: Mesh) -> None:
        """Give the stage's parameters `names` their memory, which has no values yet."""
        group, device = mesh.group(*kind.axes), mesh.device
        self.names, self.kind, self.group = tuple(names), kind, group
        metas = dict(stage.named_parameters())
        self.flat_layout = FlatLayout(tuple(metas[name].numel() for name in names), group.size())
        self.whole = torch.empty(self.flat_layout.numel, dtype=kind.dtype, device=device)
        rank, length = group.rank(), self.flat_layout.share_numel
        self.mine = self.whole[rank * length : (rank + 1) * length]
        """This rank's part of `whole`."""
        self.share = self.mine
        parts = zip(names, self.flat_layout.cut(self.whole), strict=True)
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

    def make_shares(self, layouts: dict[str, ParamLayout], precision: Precision) -> dict[str, ParamShare]:
        """Return this rank's share of each parameter, possibly an empty one."""
        rank, axes = self.group.rank(), frozenset(self.kind.axes)
        owned, parts = self.flat_layout.owned(rank), self.flat_layout.cut_share(self.share, rank)
        shares = {}
        for name, (first, last), part in zip(self.names, owned, parts, strict=True):
            layout = layouts[name]
            replicated, sharded = layout.replicated - axes, layout.sharded | axes
            layout = attrs.evolve(layout, flat=(first, last), replicated=replicated, sharded=sharded)
            compute = nn.Parameter(part, requires_grad=self.kind.trainable)
            shares[name] = precision.make_share(name, compute, layout)
        return shares


def kinds_of(
    names: Sequence[str], stage: Stage, precision: Precision, mesh: Mesh, axes: Sequence[str]
) -> dict[Kind, list[str]]:
    """Sort parameters by kind, each kind's in the order given.

    Each is sharded over the axes among `axes` that replicate it: an expert's matrix, which is cut along one axis, over
    the others. Raises `UserError` for a parameter that none of them replicates.
    """
    parameters = dict(stage.named_parameters())
    found: dict[Kind, list[str]] = {}
    for name in names:
        layout = stage.layouts[name]
        over = tuple(axis for axis in axes if axis in layout.replicated)
        if not over:
            raise UserError(
                f"zero.axes = {', '.join(axes)}: {name} is cut along all of them, so that no two ranks hold the same "
                "part; name an axis that replicates it"
            )
        partial = tuple(axis for axis in layout.sums_over(mesh) if axis not in over)
        kind = Kind(precision.dtype_of(name, stage), over, partial, parameters[name].requires_grad)
        found.setdefault(kind, []).append(name)
    return found


def cut_by_size(names: Sequence[str], sizes: Sequence[int], limit: float) -> list[list[str]]:
    """Cut `names` into runs of at least one name, whose `sizes` add up to at most `limit`."""
    runs: list[list[str]] = []
    total = 0
    for name, size in zip(names, sizes, strict=True):
        if not runs or total + size > limit:
            runs.append([])
            total = 0
        runs[-1].append(name)
        total += size
    return runs
