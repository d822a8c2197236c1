"""An auxiliary loss on every layer: its MLP's outputs are kept small, as a router's logits are by a z-loss."""

from __future__ import annotations

from typing import Any

import torch

from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel

COEFFICIENT = 5e4  # a tiny model with small initial weights has tiny outputs


class SmallOutputs:
    """The plugin."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for layer in model.module.model.layers:
            layer.mlp.side_losses = None  # the stage puts its own here
            layer.mlp.register_forward_hook(add_penalty)


def add_penalty(module: Any, _inputs: Any, output: torch.Tensor) -> None:
    """Add the mean square of each token's output [b, s, h], summed over tokens."""
    module.side_losses.add(COEFFICIENT * output.double().square().mean(-1).sum())
