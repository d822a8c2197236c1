"""Sinks for tensorboard and wandb: optional plugins, each active when named in --plugins. Rank 0 only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class TensorBoard:
    """Writes scalars into RUN/tensorboard."""

    def __init__(self) -> None:
        self._writer: Any = None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("tensorboard is not installed: pip install 'femto-core[tensorboard]'") from None
            self._writer = SummaryWriter(str(trainer.run_dir / "tensorboard"))

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    @hookimpl
    def femto_train_end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Sends metrics to Weights & Biases; WANDB_MODE=offline keeps them in the run's folder."""

    def __init__(self) -> None:
        self._run: Any = None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            try:
                import wandb
            except ImportError:
                raise UserError("wandb is not installed: pip install 'femto-core[wandb]'") from None
            self._run = wandb.init(
                project="femto", name=trainer.run_dir.name, dir=str(trainer.run_dir), config=trainer.config.to_dict()
            )

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is not None:
            self._run.log(metrics, step=step)

    @hookimpl
    def femto_train_end(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
