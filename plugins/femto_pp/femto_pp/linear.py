"""Makes a stage's linear layers able to put their weight gradients off."""

from __future__ import annotations

from typing import cast

from torch import nn

from femto_core.model import Stage
from femto_ops.linear import SplittingLinear


def split_linears(stage: Stage) -> None:
    """Make every plain `nn.Linear` inside the stage's layers a `SplittingLinear`, in place."""
    for _, layer in stage.named_layers():
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = SplittingLinear
                cast(SplittingLinear, module).later = stage.weight_grads
