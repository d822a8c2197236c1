"""An observer: keeps what the hooks tell it, without state of its own between them."""

from __future__ import annotations

from typing import Any

from femto_core.hookspecs import hookimpl
from femto_core.metrics import StepInfo
from femto_core.trainer import Trainer


class Observer:
    """The plugin."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        self.seen.append(("begin", trainer.step))

    @hookimpl
    def femto_step_begin(self, trainer: Trainer, step: int) -> None:
        self.seen.append(("step begin", step, trainer.step))

    @hookimpl
    def femto_step_end(self, trainer: Trainer, info: StepInfo) -> None:
        self.seen.append(("step end", info.step, trainer.step))

    @hookimpl
    def femto_log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self.seen.append(("log", step, sorted(metrics)[:1], trainer.mesh.rank))

    @hookimpl
    def femto_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.seen.append(("end", trainer.step, error))
