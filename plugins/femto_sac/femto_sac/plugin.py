"""The hooks of plugin sac. Imports of torch wait until a run needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from femto_core.errors import UserError, suggest
from femto_core.hookspecs import hookimpl
from femto_sac.section import SACSection

if TYPE_CHECKING:
    from torch import nn

    from femto_core.config import Config
    from femto_core.model import Stage
    from femto_core.trainer import Trainer
    from femto_sac.budget import Budget


class ActivationCheckpointing:
    """Wraps layers."""

    def __init__(self) -> None:
        self._budget: Budget | None = None
        self._wrapped = 0

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[SACSection]]:
        return "sac", SACSection

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        from femto_sac.policies import POLICIES

        section = config.section(SACSection)
        known = [*POLICIES, "auto"]
        if section.policy not in known:
            raise UserError(
                f"sac.policy = {section.policy!r} is no policy{suggest(section.policy, known)} "
                f"(policies: {', '.join(known)})"
            )
        if (section.policy == "modules") != bool(section.pattern):
            raise UserError("sac.policy = 'modules' and sac.pattern go together: set both or neither")
        if (section.policy == "auto") != bool(section.budget_gib):
            raise UserError("sac.policy = 'auto' and sac.budget_gib go together: set both or neither")

    @hookimpl
    def femto_wrap_layer(self, name: str, layer: nn.Module, stage: Stage, config: Config) -> nn.Module | None:
        if not stage.trainable:  # no backward will ask for its activations
            return None
        from femto_sac.budget import GIB, Budget
        from femto_sac.policies import POLICIES, WHOLE
        from femto_sac.wrapper import ActivationCheckpointWrapper

        section = config.section(SACSection)
        if section.policy == "auto":
            if self._budget is None:
                self._budget = Budget(section.budget_gib * GIB)
            self._budget.layers += 1
            self._wrapped += 1
            return ActivationCheckpointWrapper(layer, self._budget.choose)
        for own, treatment in POLICIES[section.policy](name, layer, section).items():
            self._wrapped += 1
            if own == WHOLE:
                return ActivationCheckpointWrapper(layer, lambda *_, chosen=treatment: chosen)
            parent, _, child = own.rpartition(".")
            module = layer.get_submodule(own)
            wrapper = ActivationCheckpointWrapper(module, lambda *_, chosen=treatment: chosen)
            setattr(layer.get_submodule(parent), child, wrapper)
        return None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        from femto_sac.budget import GIB, Budget

        section = trainer.config.section(SACSection)
        if section.policy == "auto" and self._budget is None:  # a pipeline's stage without layers decides with the rest
            self._budget = Budget(section.budget_gib * GIB)
        if section.policy == "modules" and not any(trainer.mesh.gather_objects(self._wrapped)):
            raise UserError(f"sac.pattern = {section.pattern!r} matches no module of this model's layers")

    @hookimpl
    def femto_step_end(self, trainer: Trainer) -> None:
        from femto_sac.budget import Load

        budget, self._budget = self._budget, None  # decided once
        if budget is None:
            return
        rows = trainer.schedule.in_flight(trainer.loader.accumulation) * trainer.config.data.micro_batch
        loads = trainer.mesh.gather_objects(Load(budget.layers, rows, budget.costs))
        budget.decide(loads, trainer.mesh.rank)
