"""One thin, typed method for each hook, so that the rest of the kernel never touches pluggy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pluggy

from femto_core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from femto_core.checkpoint import Checkpointer, Stateful
    from femto_core.cli import CommandRegistry
    from femto_core.config import Config
    from femto_core.data import Collator, Dataset
    from femto_core.loss import Loss
    from femto_core.mesh import Axis, Mesh
    from femto_core.metrics import StepInfo
    from femto_core.model import FullModel, Stage
    from femto_core.optim import LRSchedule
    from femto_core.precision import MixedPrecisionManager, ParamGroup
    from femto_core.schedule import Schedule
    from femto_core.sharding import ShardingStrategy
    from femto_core.sync import GradientSynchronizer
    from femto_core.trainer import Trainer

T = TypeVar("T")


def _seated(seat: str, strategy: Any) -> Any:
    if strategy is None:
        raise UserError(f"nobody sits in {seat}: the built-in default is blocked and no active plugin takes the seat")
    return strategy


@attrs.frozen
class Hooks:
    """Calls hooks. A seat returns its one strategy, a collecting hook the list of all results that are not None."""

    manager: pluggy.PluginManager

    def config_section(self) -> list[tuple[str, type[Any]]]:
        """Return every plugin's section. Raises `UserError` where two plugins bring one of the same name."""
        sections: list[tuple[str, type[Any]]] = list(self.manager.hook.femto_config_section())
        first = dict(reversed(sections))
        for name, cls in sections:
            if cls is not first[name]:
                raise UserError(
                    f"two active plugins bring a config section [{name}]: {cls.__module__} and "
                    f"{first[name].__module__}; remove one of them from --plugins"
                )
        return sections

    def config_defaults(self) -> list[Mapping[str, Any]]:
        """Return every plugin's defaults, those that win last."""
        return list(reversed(self.manager.hook.femto_config_defaults()))

    def commands(self, registry: CommandRegistry) -> None:
        self.manager.hook.femto_commands(registry=registry)

    def validate(self, config: Config) -> None:
        self.manager.hook.femto_validate(config=config)

    def mesh_axes(self, config: Config) -> list[Axis]:
        return [axis for axes in self.manager.hook.femto_mesh_axes(config=config) for axis in axes]

    def dataset(self, config: Config, split: str) -> Dataset:
        return _seated("femto_dataset", self.manager.hook.femto_dataset(config=config, split=split))

    def collator(self, config: Config) -> Collator:
        return _seated("femto_collator", self.manager.hook.femto_collator(config=config))

    def model(self, config: Config) -> FullModel:
        return _seated("femto_model", self.manager.hook.femto_model(config=config))

    def transform_model(self, model: FullModel, config: Config) -> None:
        self.manager.hook.femto_transform_model(model=model, config=config)

    def schedule(self, config: Config, mesh: Mesh) -> Schedule:
        return _seated("femto_schedule", self.manager.hook.femto_schedule(config=config, mesh=mesh))

    def parallelize(self, stage: Stage, mesh: Mesh, config: Config) -> None:
        self.manager.hook.femto_parallelize(stage=stage, mesh=mesh, config=config)

    def wrap_layer(self, name: str, layer: nn.Module, config: Config) -> nn.Module:
        """Let each plugin wrap what the one before returned: the last loaded lies innermost, the default outermost."""
        for implementation in reversed(self.manager.hook.femto_wrap_layer.get_hookimpls()):
            others = [p for p in self.manager.get_plugins() if p is not implementation.plugin]
            caller = self.manager.subset_hook_caller("femto_wrap_layer", others)
            for wrapped in caller(name=name, layer=layer, config=config):
                layer = wrapped
        return layer

    def precision(self, config: Config) -> MixedPrecisionManager:
        return _seated("femto_precision", self.manager.hook.femto_precision(config=config))

    def sharding(self, config: Config, mesh: Mesh) -> ShardingStrategy:
        return _seated("femto_sharding", self.manager.hook.femto_sharding(config=config, mesh=mesh))

    def grad_sync(self, config: Config, mesh: Mesh, sharding: ShardingStrategy) -> GradientSynchronizer:
        synchronizer = self.manager.hook.femto_grad_sync(config=config, mesh=mesh, sharding=sharding)
        return _seated("femto_grad_sync", synchronizer)

    def optimizer(self, config: Config, groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
        return _seated("femto_optimizer", self.manager.hook.femto_optimizer(config=config, groups=groups))

    def lr_schedule(self, config: Config) -> LRSchedule:
        return _seated("femto_lr_schedule", self.manager.hook.femto_lr_schedule(config=config))

    def loss(self, config: Config, mesh: Mesh) -> Loss:
        return _seated("femto_loss", self.manager.hook.femto_loss(config=config, mesh=mesh))

    def checkpointer(self, config: Config, mesh: Mesh) -> Checkpointer:
        return _seated("femto_checkpointer", self.manager.hook.femto_checkpointer(config=config, mesh=mesh))

    def checkpoint_state(self) -> list[tuple[str, Stateful]]:
        return list(self.manager.hook.femto_checkpoint_state())

    def train_begin(self, trainer: Trainer) -> None:
        self.manager.hook.femto_train_begin(trainer=trainer)

    def step_begin(self, step: int) -> None:
        self.manager.hook.femto_step_begin(step=step)

    def step_end(self, info: StepInfo) -> None:
        self.manager.hook.femto_step_end(info=info)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.manager.hook.femto_log(step=step, metrics=metrics)

    def train_end(self, trainer: Trainer) -> None:
        self.manager.hook.femto_train_end(trainer=trainer)
