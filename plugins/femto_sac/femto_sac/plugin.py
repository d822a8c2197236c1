"""The hooks of plugin sac. Imports of torch wait until a run needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError, suggest
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive

if TYPE_CHECKING:
    from torch import nn

    from femto_core.config import Config
    from femto_core.trainer import Trainer
    from femto_sac.budget import Budget


@attrs.frozen(kw_only=True)
class SACSection:
    """Activations that are computed again in backward instead of being saved."""

    policy: str = "full"
    """none, full, selective (keep matrix products and attention), modules (by sac.pattern), auto (to sac.budget_gib),
    or one that a plugin registers."""
    every: int = attrs.field(default=1, validator=positive)
    """Treat every so many layers only; for full and selective."""
    pattern: str = ""
    """For modules: names of those to checkpoint, such as model.layers.*.mlp."""
    budget_gib: float = attrs.field(default=0.0, validator=not_negative)
    """For auto: GiB that the layers of this rank may save for backward."""


class ActivationCheckpointing:
    """Wraps layers."""

    def __init__(self) -> None:
        self._budget: Budget | None = None
        self._wrapped = 0
        self._trainer: Trainer | None = None

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
            raise UserError("sac.policy = 'modules' and sac.pattern go together: the one says to use the other")
        if (section.policy == "auto") != bool(section.budget_gib):
            raise UserError("sac.policy = 'auto' and sac.budget_gib go together: the one says to use the other")

    @hookimpl
    def femto_wrap_layer(self, name: str, layer: nn.Module, config: Config) -> nn.Module | None:
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

        self._trainer = trainer
        section = trainer.config.section(SACSection)
        if section.policy == "auto" and self._budget is None:  # a pipeline's stage without layers decides with the rest
            self._budget = Budget(section.budget_gib * GIB)
        if section.policy == "modules" and not any(trainer.mesh.gather_objects(self._wrapped)):
            raise UserError(f"sac.pattern = {section.pattern!r} matches no module of this model's layers")

    @hookimpl
    def femto_step_end(self) -> None:
        from femto_sac.budget import Load

        budget, trainer = self._budget, self._trainer
        if budget is None or trainer is None:
            return
        self._budget = None  # decided once
        sampler = trainer.loader.sampler
        rows = trainer.schedule.in_flight(sampler.accumulation) * sampler.micro_batch
        loads = trainer.mesh.gather_objects(Load(budget.layers, rows, budget.costs))
        budget.decide(loads, trainer.mesh.rank)
