"""A torch.profiler trace of a few steps, written for the Chrome or Perfetto viewer: one file for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class Profiler:
    """Traces `profile.steps` steps from `profile.step` on, into trace-rank-N.json."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._profile: Any = None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        self._trainer = trainer if trainer.config.profile.step else None

    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        if self._trainer is not None and step == self._trainer.config.profile.step:
            from torch.profiler import profile

            self._profile = profile()
            self._profile.start()

    @hookimpl
    def femto_step_end(self) -> None:
        if self._trainer is None or self._profile is None:
            return
        section = self._trainer.config.profile
        if self._trainer.step >= section.step + section.steps - 1:
            self._finish()

    @hookimpl
    def femto_train_end(self) -> None:
        if self._profile is not None:
            self._finish()
        self._trainer = None

    def _finish(self) -> None:
        assert self._trainer is not None
        self._profile.stop()
        path = self._trainer.run_dir / f"trace-rank-{self._trainer.mesh.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 made it on its own machine
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        if self._trainer.mesh.rank == 0:
            print(f"trace    {path} (and one for each other rank): open it in ui.perfetto.dev", flush=True)
