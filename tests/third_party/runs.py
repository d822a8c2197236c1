"""How a third party's plugin is trained in tests: by its class, beside femto's own, on any number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from femto_core.trainer import Trainer
from femto_tools.testing import RandomTask, make_trainer, record_training

Values = Mapping[str, Mapping[str, Any]]
PLUGINS = {
    "pairs": "pairs:Pairs",
    "context": "context:ContextParallelism",
    "hybrid": "hybrid:HybridShards",
    "polar": "polar:PolarPlugin",
    "side_loss": "side_loss:SmallOutputs",
    "curriculum": "curriculum:Curriculum",
    "masters_in_files": "masters_in_files:MastersInFilesPlugin",
    "reference": "reference:Reference",
    "observer": "observer:Observer",
    "lora": "lora:LowRankAdapters",
    "lora_tp": "lora_tp:ShardedAdapters",
    "ema": "ema:MovingAverage",
    "experts": "experts:Experts",
    "expert_parallel": "experts:ExpertParallelism",
    "rollouts": "rollouts:Rollouts",
    "offload": "offload:ActivationOffload",
    "v_schedule": "v_schedule:VSchedule",
    "scaled_linear": "scaled_linear:ScaledLinears",
}
PROVIDE_DATA = ("pairs", "rollouts")


def make(name: str) -> object:
    """Return a new instance of the plugin `name`."""
    module, _, cls = PLUGINS[name].partition(":")
    plugin: object = getattr(importlib.import_module(f"tests.third_party.{module}"), cls)()
    return plugin


def trainer_with(
    third: Sequence[str], values: Values, plugins: Sequence[str] = (), task: RandomTask | None = None
) -> Trainer:
    """Build a trainer with third parties' plugins beside femto's own."""
    objects = {name: make(name) for name in third}
    if not set(third) & set(PROVIDE_DATA):
        objects = {"random_task": task or RandomTask(), **objects}
    return make_trainer(values, plugins, objects)


def train(
    third: Sequence[str], values: Values, plugins: Sequence[str] = (), task: RandomTask | None = None
) -> dict[str, Any]:
    """Train as a worker's job; return this rank's part of a `Record`."""
    return record_training(trainer_with(third, values, plugins, task))
