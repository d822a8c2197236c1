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
class ParamShare:
    """This rank's share of one parameter (all of it, unless a strategy shards), in its two roles.

    `compute` is what forward and backward see of the share, and where its finished gradient lies; `master` is what the
    optimizer sees. Without mixed precision both are one tensor.
    """

    name: str
    compute: nn.Parameter
    master: nn.Parameter
    layout: ParamLayout

    @property
    def trainable(self) -> bool:
        """Whether the parameter is trained; this rank's share of it may be empty."""
        return self.master.requires_grad


class Precision(Protocol):
    """Decides dtypes and keeps the two roles of each `ParamShare` in step.

    A step does, for each of `update_groups` in turn: copy_grads_to_master, (clip, update), sync_weights, zero_grad.
    """

    def dtype_of(self, name: str, stage: Stage) -> torch.dtype:
        """Return the dtype in which the parameter `name` of the stage computes."""

    def accumulate_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters of dtype `compute` add up over micro-batches."""

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which they travel between ranks: as wide as `accumulate_dtype`, or narrower."""

    def make_share(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamShare:
        """Pair a parameter (or this rank's share of it) with its master."""

    def update_groups(self, shares: Sequence[ParamShare]) -> Sequence[Sequence[ParamShare]]:
        """Divide `shares` into groups that are updated one after the other, so that few wide gradients exist at once.

        Ranks that hold the same parameters must get the same groups, in the same order, however large their own shares
        are: an optimizer may communicate within a group.
        """

    def copy_grads_to_master(self, shares: Sequence[ParamShare]) -> None:
        """Make each `master.grad` the finished gradient of `compute`."""

    def sync_weights(self, shares: Sequence[ParamShare]) -> None:
        """Copy updated masters into `compute`."""

    def zero_grad(self, shares: Sequence[ParamShare]) -> None:
        """Drop the gradients of both roles."""


class SinglePrecision:
    """One dtype for everything: the master is the parameter itself, so nothing is copied."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def dtype_of(self, name: str, stage: Stage) -> torch.dtype:
        return self._dtype

    def accumulate_dtype(self, compute: torch.dtype) -> torch.dtype:
        return compute

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        return compute

    def make_share(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamShare:
        return ParamShare(name=name, compute=compute, master=compute, layout=layout)

    def update_groups(self, shares: Sequence[ParamShare]) -> Sequence[Sequence[ParamShare]]:
        return [shares]

    def copy_grads_to_master(self, shares: Sequence[ParamShare]) -> None:
        pass

    def sync_weights(self, shares: Sequence[ParamShare]) -> None:
        pass

    def zero_grad(self, shares: Sequence[ParamShare]) -> None:
        for share in shares:
            share.master.grad = None
