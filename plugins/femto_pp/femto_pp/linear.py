"""Lets a stage's linear layers defer their weight gradients."""

from __future__ import annotations

from typing import cast

from torch import nn

from femto_core.model import Stage
from femto_ops.linear import SplittingLinear


def split_linears(stage: Stage) -> None:
    """Turn every plain `nn.Linear` inside the stage's decoder layers into a `SplittingLinear`, in place."""
    for _, layer in stage.named_layers():
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = SplittingLinear
                cast(SplittingLinear, module).weight_grads = stage.weight_grads
