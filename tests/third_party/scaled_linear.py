"""Linear layers whose input is limited by its largest value in the steps before: the state of delayed FP8 scaling.

The largest value is a buffer of each layer. It is taken over all micro-batches and data ranks of a step, used from the
next step on, and kept in checkpoints under any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from femto_core.checkpoint import Stateful
from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel
from femto_core.trainer import Trainer

START, DECAY = 1e-3, 0.5
"""The first maximum, and what remains of a maximum after a step."""


class ScaledLinear(nn.Linear):
    """W applied to m tanh(x / m), where m is the running maximum of |x| up to the step before."""

    largest: torch.Tensor
    seen: torch.Tensor

    def reset_buffers(self, device: torch.device) -> None:
        """Begin anew: `largest` m, and `seen`, the largest value of the step in progress."""
        self.largest = torch.full((), START, dtype=torch.float64, device=device)
        self.seen = torch.zeros((), dtype=torch.float64, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d_in] -> [..., d_out]."""
        if self.training:
            with torch.no_grad():
                self.seen.copy_(torch.maximum(self.seen, x.abs().max()))
        return super().forward(self.largest * torch.tanh(x / self.largest))


class ScaledLinears:
    """The plugin, and its own part of a checkpoint: each layer's maximum, of all stages."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for layer in model.module.model.layers:
            linear = layer.self_attn.o_proj
            linear.__class__ = ScaledLinear
            linear.register_buffer("largest", torch.empty((), device="meta"))
            linear.register_buffer("seen", torch.empty((), device="meta"))

    @hookimpl
    def femto_checkpoint_state(self) -> tuple[str, Stateful]:
        return "scaled_linear", self

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        for name, layer in scaled_layers(trainer).items():
            layer.largest.fill_(self._largest.get(name, START))

    @hookimpl
    def femto_step_end(self, trainer: Trainer) -> None:
        layers = scaled_layers(trainer)
        values = [float(layer.seen) for layer in layers.values()]
        seen = torch.tensor(values, dtype=torch.float64, device=trainer.mesh.device)
        if layers and trainer.mesh.size(*trainer.mesh.data_axes) > 1:
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=trainer.mesh.group(*trainer.mesh.data_axes))
        for layer, value in zip(layers.values(), seen.tolist(), strict=True):
            layer.largest.fill_(max(DECAY * float(layer.largest), value))
            layer.seen.zero_()
        mine = {name: float(layer.largest) for name, layer in layers.items()}
        self._largest = {name: value for some in trainer.mesh.gather_objects(mine) for name, value in some.items()}

    def state_dict(self) -> Mapping[str, Any]:
        return {"largest": self._largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._largest = dict(state["largest"])


def scaled_layers(trainer: Trainer) -> dict[str, ScaledLinear]:
    """Return this rank's scaled layers by name."""
    return {name: m for name, m in trainer.stage.module.named_modules() if isinstance(m, ScaledLinear)}
