"""A torch.profiler trace of a few steps, written for the Chrome or Perfetto viewer: one file for each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive
from femto_data.atomic import atomic_path, remove
from femto_report.writing import Writing, say, warn

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.trainer import Trainer


@attrs.frozen(kw_only=True)
class ProfileSection:
    """A torch.profiler trace for the Chrome or Perfetto viewer."""

    step: int = attrs.field(default=0, validator=not_negative)
    """First step to trace; 0: none."""
    steps: int = attrs.field(default=1, validator=positive)
    """How many steps to trace."""


class Profiler:
    """Traces `profile.steps` steps from `profile.step` on, into trace-rank-N.json."""

    def __init__(self) -> None:
        self._profile: Any = None

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[ProfileSection]]:
        return "profile", ProfileSection

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        first, steps = config.section(ProfileSection).step, config.train.steps
        if first > (config.train.stop_after or steps):
            limit = "train.stop_after" if config.train.stop_after else "train.steps"
            raise UserError(
                f"profile.step = {first} lies beyond {limit} = {config.train.stop_after or steps}: no trace"
            )

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        first = trainer.config.section(ProfileSection).step
        if 0 < first <= trainer.step and trainer.mesh.rank == 0:
            warn(f"profile.step = {first}: the run goes on at step {trainer.step + 1}, so nothing is traced")

    @hookimpl
    def femto_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == trainer.config.section(ProfileSection).step:
            from torch.profiler import profile

            self._profile = profile()
            self._profile.start()

    @hookimpl
    def femto_step_end(self, trainer: Trainer) -> None:
        section = trainer.config.section(ProfileSection)
        if self._profile is not None and trainer.step >= section.step + section.steps - 1:
            self._finish(trainer)

    @hookimpl
    def femto_train_end(self, trainer: Trainer) -> None:
        if self._profile is not None:
            self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        self._profile.stop()
        profile, self._profile = self._profile, None
        path = trainer.run_dir / f"trace-rank-{trainer.mesh.rank}.json"
        with Writing().to(path):
            path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 made it on its own machine
            with atomic_path(path) as partial:
                profile.export_chrome_trace(str(partial))
                _check_whole(partial)
            if trainer.mesh.rank == 0:
                say(f"trace    {path} (and one for each other rank): open it in ui.perfetto.dev")


def _check_whole(path: Path) -> None:
    """Raise OSError where the profiler, which does not say so, could not write all of a trace."""
    remove(path.with_name(f"{path.name}.tmp"))  # where the profiler begins, and what it leaves there
    content = b""
    if path.exists():
        with path.open("rb") as file:
            file.seek(-min(path.stat().st_size, 64), os.SEEK_END)
            content = file.read()
    if not content.rstrip().endswith(b"}"):
        raise OSError("the disk is full, or a file may not be so large")
