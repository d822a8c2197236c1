"""Mixed precision: narrow weights to compute with, wide ones to update (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
import torch
from torch import nn

from femto_core.layout import ParamLayout
from femto_core.model import Stage
from femto_core.precision import ParamGroup


@attrs.frozen(kw_only=True)
class MixedPrecision:
    """Computes in one dtype and updates masters of another; with bf16 no loss scaling is needed."""

    compute: torch.dtype
    master: torch.dtype
    accumulate: torch.dtype
    """Of gradients over micro-batches."""
    reduce: torch.dtype
    """Of gradients between ranks."""
    part_bytes: int
    """Bytes of masters updated at a time: wide gradients exist only for so many."""

    def dtype_of(self, name: str, stage: Stage) -> torch.dtype:
        """Return the master's dtype where the model insists on fp32 for this module, otherwise the compute dtype."""
        wide = getattr(stage.module, "_keep_in_fp32_modules_strict", None) or ()
        keeps = any(re.search(rf"(^|\.){re.escape(module)}(\.|$)", name) for module in wide)
        return self.master if keeps else self.compute

    def accumulate_dtype(self, compute: torch.dtype) -> torch.dtype:
        return self.accumulate if compute == self.compute else compute

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        return self.reduce if compute == self.compute else compute

    def make_group(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamGroup:
        """Give a trainable narrow parameter a master; a frozen one, or one that computes in fp32, is its own."""
        master = compute
        if compute.requires_grad and compute.dtype == self.compute:
            master = nn.Parameter(torch.empty_like(compute, dtype=self.master))
        return ParamGroup(name=name, compute=compute, master=master, layout=layout)

    def parts(self, groups: Sequence[ParamGroup]) -> Sequence[Sequence[ParamGroup]]:
        """Cut `groups` so that the gradients to be widened at a time fit; those that are wide already cost nothing.

        Groups that are their own masters come first: the optimizer sees their gradients in whichever part it updates.
        """
        parts: list[list[ParamGroup]] = [[]]
        size = 0
        for group in sorted(groups, key=lambda group: group.master is not group.compute):
            grad = group.compute.grad
            cost = 0 if grad is None or grad.dtype == group.master.dtype else group.master.nbytes
            if size + cost > self.part_bytes and size:
                parts.append([])
                size = 0
            parts[-1].append(group)
            size += cost
        return parts

    def copy_grads_to_master(self, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            if group.master is not group.compute and group.compute.grad is not None:
                group.master.grad = group.compute.grad.to(group.master.dtype)

    @torch.no_grad()
    def sync_weights(self, groups: Sequence[ParamGroup]) -> None:
        apart = [group for group in groups if group.master is not group.compute and group.master.numel()]
        if apart:
            torch._foreach_copy_([group.compute for group in apart], [group.master for group in apart])

    def zero_grad(self, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            group.master.grad = group.compute.grad = None
