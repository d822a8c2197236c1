"""The precision seat: in which dtype weights compute, in which they are updated, and what carries values over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import nn

from femto_core.layout import ParamLayout
from femto_core.model import Stage


@attrs.frozen(kw_only=True)
class ParamGroup:
    """One parameter, or this rank's share of it, in its two roles.

    `compute` is what forward and backward see (or the share of it this rank owns) and where the reduced gradient lies;
    `master` is what the optimizer sees. Without mixed precision they are one tensor.
    """

    name: str
    compute: nn.Parameter
    master: nn.Parameter
    layout: ParamLayout

    @property
    def trainable(self) -> bool:
        """Whether there is anything for the optimizer to do: a gradient is wanted, and the share is not empty."""
        return self.master.requires_grad and self.master.numel() > 0


class MixedPrecisionManager(Protocol):
    """Decides dtypes and keeps `ParamGroup`s in step.

    One step, for each of the `parts` in turn: copy_grads_to_master, (clip, update), sync_weights, zero_grad.
    """

    def dtype_of(self, name: str, stage: Stage) -> torch.dtype:
        """Return the dtype in which the parameter `name` of the stage computes."""

    def accumulate_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of dtype `compute` add up over micro-batches."""

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which they travel between ranks: as wide as `accumulate_dtype`, or narrower."""

    def make_group(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamGroup:
        """Pair a parameter (or share) with its master."""

    def parts(self, groups: Sequence[ParamGroup]) -> Sequence[Sequence[ParamGroup]]:
        """Divide `groups` into those to be updated together, so that not all gradients are there twice at once."""

    def copy_grads_to_master(self, groups: Sequence[ParamGroup]) -> None:
        """Make each `master.grad` the gradient that `compute` has after reduction."""

    def sync_weights(self, groups: Sequence[ParamGroup]) -> None:
        """Carry updated masters back into `compute`."""

    def zero_grad(self, groups: Sequence[ParamGroup]) -> None:
        """Drop the gradients of both roles."""


class SinglePrecision:
    """One dtype for everything: the master is the parameter itself, so nothing needs carrying."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def dtype_of(self, name: str, stage: Stage) -> torch.dtype:
        return self._dtype

    def accumulate_dtype(self, compute: torch.dtype) -> torch.dtype:
        return compute

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        return compute

    def make_group(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamGroup:
        return ParamGroup(name=name, compute=compute, master=compute, layout=layout)

    def parts(self, groups: Sequence[ParamGroup]) -> Sequence[Sequence[ParamGroup]]:
        return [groups]

    def copy_grads_to_master(self, groups: Sequence[ParamGroup]) -> None:
        pass

    def sync_weights(self, groups: Sequence[ParamGroup]) -> None:
        pass

    def zero_grad(self, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            group.master.grad = None
