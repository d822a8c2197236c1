"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) around q_proj and v_proj; all other parameters are frozen.

The base weight keeps its name, so that the weights of any Hugging Face directory load. An export merges the adapters
into it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from femto_core.checkpoint import ExportTensor
from femto_core.config import Config
from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel
from tests.third_party.seeded import SeededWeights

RANK, SCALE = 2, 2.0
A, B = "lora_a", "lora_b"


class LowRankLinear(nn.Linear):
    """y = x W^T + b + SCALE x A^T B^T, with A [r, d_in] and B [d_out, r]."""

    def __init__(self, base: nn.Linear) -> None:
        """Take over weight and bias of `base`."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(torch.empty(RANK, base.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, RANK, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d_in] -> [..., d_out]."""
        return super().forward(x) + SCALE * F.linear(F.linear(x, self.lora_a), self.lora_b)


class LowRankAdapters:
    """The plugin."""

    @hookimpl
    def femto_transform_model(self, model: FullModel, config: Config) -> None:
        model.module.requires_grad_(False)
        for layer in model.module.model.layers:
            for key in ("q_proj", "v_proj"):
                setattr(layer.self_attn, key, LowRankLinear(getattr(layer.self_attn, key)))
        added = {name: tuple(p.shape) for name, p in model.module.named_parameters() if p.requires_grad}
        model.weights = SeededWeights(model.weights, added, config.train.seed)

    @hookimpl
    def femto_export(
        self, tensors: dict[str, ExportTensor], saved: Mapping[str, ExportTensor], settings: Mapping[str, Any]
    ) -> None:
        for name in [name for name in tensors if name.endswith(A)]:
            base = name.removesuffix(A)
            a, b, weight = tensors.pop(name), tensors.pop(base + B), tensors[base + "weight"]
            tensors[base + "weight"] = ExportTensor(weight.shape, functools.partial(merged, weight, a, b))


def merged(weight: ExportTensor, a: ExportTensor, b: ExportTensor) -> torch.Tensor:
    """Return W + SCALE B A."""
    return weight.read() + SCALE * b.read() @ a.read()
