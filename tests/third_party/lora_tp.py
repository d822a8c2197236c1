"""Low-rank adapters on layers that tensor parallelism cuts: B with the rows of the column layer, A whole.

Each rank's gradient of A is a partial sum, because each rank sees the outputs of its own heads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from femto_core.hookspecs import hookimpl
from femto_tp.column import ColumnParallelLinear
from femto_tp.kinds import ColumnKind, Context, ShardLoader, Whole, parallel_kind
from femto_tp.regions import copy_to_tp_region
from tests.third_party.lora import SCALE, A


class LowRankColumn(ColumnParallelLinear):
    """A column layer of which this rank computes some outputs, with an adapter on these."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], context: Context, *arguments: Any) -> None:
        super().__init__(parameters["weight"], parameters.get("bias"), *arguments)
        self.lora_a, self.lora_b = parameters["lora_a"], parameters["lora_b"]
        # With sequence parallelism, the gather before the layer sums the input's gradient.
        self._input_ranks = context.ranks if context.sequence is None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, d_in] -> [b, s, outputs of this rank]."""
        source = x if self._input_ranks is None else copy_to_tp_region(x, self._input_ranks)
        b = self.lora_b if self.replicas is None else copy_to_tp_region(self.lora_b, self.replicas)
        return super().forward(x) + SCALE * F.linear(F.linear(source, self.lora_a), b)


class LowRankColumnKind(ColumnKind):
    """Cuts weight, bias and B as the column layer is cut."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Whole(partial=True) if suffix == A else super().loader(suffix, context)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        replicas = context.replicas if self.by == "kv" else None
        return LowRankColumn(parameters, context, context.column_group(name), replicas)


parallel_kind("column_lora:q")(lambda: LowRankColumnKind("q"))
parallel_kind("column_lora:kv")(lambda: LowRankColumnKind("kv"))


class ShardedAdapters:
    """The plugin: to be named beside tp and the adapters."""

    @hookimpl
    def femto_config_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        attention = "model.layers.*.self_attn"
        return {"tp": {"plan": {f"{attention}.q_proj": "column_lora:q", f"{attention}.v_proj": "column_lora:kv"}}}
