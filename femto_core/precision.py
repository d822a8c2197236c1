"""The precision seat: in which dtype weights compute, in which they are updated, and what carries values over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import nn

from femto_core.layout import ParamLayout


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
    """Keeps `ParamGroup`s in step. One step: copy_grads_to_master, (clip, update), sync_weights, zero_grad."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype the stage is given memory in."""

    def make_group(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamGroup:
        """Pair a parameter (or share) with its master."""

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

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._dtype

    def make_group(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamGroup:
        return ParamGroup(name=name, compute=compute, master=compute, layout=layout)

    def copy_grads_to_master(self, groups: Sequence[ParamGroup]) -> None:
        pass

    def sync_weights(self, groups: Sequence[ParamGroup]) -> None:
        pass

    def zero_grad(self, groups: Sequence[ParamGroup]) -> None:
        for group in groups:
            group.master.grad = None
