"""Sinks for tensorboard and wandb: optional plugins, each active when named in --plugins. Rank 0 only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_report.writing import reason, warn

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class Tracker:
    """What trackers share: one that fails is warned of and left, and training goes on."""

    def __init__(self) -> None:
        self._sink: Any = None

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever its library raises
            self._sink = None
            warn(f"{type(self).__name__} cannot be written to: {reason(error)}; training goes on without it")


class TensorBoard(Tracker):
    """Writes scalars into RUN/tensorboard."""

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("tensorboard is not installed: pip install 'femto-core[tensorboard]'") from None
            with self._trying():
                self._sink = SummaryWriter(str(trainer.run_dir / "tensorboard"))

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._sink is not None:
            with self._trying():
                for name, value in metrics.items():
                    self._sink.add_scalar(name, value, step)

    @hookimpl
    def femto_train_end(self) -> None:
        if self._sink is not None:
            with self._trying():
                self._sink.close()
            self._sink = None


class WandB(Tracker):
    """Sends metrics to Weights & Biases; WANDB_MODE=offline keeps them in the run's folder."""

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            try:
                import wandb
            except ImportError:
                raise UserError("wandb is not installed: pip install 'femto-core[wandb]'") from None
            settings = trainer.config.to_dict()
            with self._trying():
                self._sink = wandb.init(
                    project="femto", name=trainer.run_dir.name, dir=str(trainer.run_dir), config=settings
                )

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._sink is not None:
            with self._trying():
                self._sink.log(metrics, step=step)

    @hookimpl
    def femto_train_end(self) -> None:
        if self._sink is not None:
            with self._trying():
                self._sink.finish()
            self._sink = None
