"""Mixed precision: weights compute in a narrow dtype and are updated in a wide one.

(Micikevicius et al. 2018, arXiv:1710.03740.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import torch
from torch import nn

from femto_core.layout import ParamLayout
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.precision import ParamShare


@attrs.frozen(kw_only=True)
class MixedPrecision:
    """Computes in one dtype and updates masters of another; with bf16 no loss scaling is needed."""

    compute: torch.dtype
    master: torch.dtype
    accumulate: torch.dtype
    """Dtype in which gradients add up over micro-batches."""
    reduce: torch.dtype
    """Dtype in which gradients travel between ranks."""
    group_bytes: int
    """Bytes of masters that are updated at a time: wide gradients exist for only so many."""
    mesh: Mesh

    def dtype_of(self, name: str, stage: Stage) -> torch.dtype:
        """Return the master's dtype if the model keeps this module in fp32, otherwise the compute dtype."""
        wide = getattr(stage.module, "_keep_in_fp32_modules_strict", None) or ()
        keeps = any(re.search(rf"(^|\.){re.escape(module)}(\.|$)", name) for module in wide)
        return self.master if keeps else self.compute

    def accumulate_dtype(self, compute: torch.dtype) -> torch.dtype:
        return self.accumulate if compute == self.compute else compute

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        return self.reduce if compute == self.compute else compute

    def make_share(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamShare:
        """Give a trainable narrow parameter a master. Frozen and fp32 parameters are their own masters."""
        master = compute
        if compute.requires_grad and compute.dtype == self.compute:
            master = nn.Parameter(torch.empty_like(compute, dtype=self.master))
        return ParamShare(name=name, compute=compute, master=master, layout=layout)

    def update_groups(self, shares: Sequence[ParamShare]) -> Sequence[Sequence[ParamShare]]:
        """Cut `shares` so that the gradients to be widened at a time fit in `group_bytes`.

        A share counts as large as the average rank's, so that ranks of one data group cut alike. Shares that are their
        own masters need no wide gradient, and come first.
        """
        groups: list[list[ParamShare]] = [[]]
        size = 0.0
        for share in sorted(shares, key=lambda share: share.master is not share.compute):
            cost = 0.0
            if share.master is not share.compute:
                cost = share.layout.box.numel * self.master.itemsize / self.mesh.size(*share.layout.sharded)
            if size + cost > self.group_bytes and size:
                groups.append([])
                size = 0.0
            groups[-1].append(share)
            size += cost
        return groups

    def copy_grads_to_master(self, shares: Sequence[ParamShare]) -> None:
        for share in shares:
            if share.master is not share.compute and share.compute.grad is not None:
                share.master.grad = share.compute.grad.to(share.master.dtype)

    @torch.no_grad()
    def sync_weights(self, shares: Sequence[ParamShare]) -> None:
        apart = [share for share in shares if share.master is not share.compute and share.master.numel()]
        if apart:
            torch._foreach_copy_([share.compute for share in apart], [share.master for share in apart])

    def zero_grad(self, shares: Sequence[ParamShare]) -> None:
        for share in shares:
            share.master.grad = share.compute.grad = None
