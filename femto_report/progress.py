"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from femto_core.trainer import Trainer


class ProgressReport:
    """Shows loss, gradient norm, learning rate, speed, memory and time left."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started, self._first_step = 0.0, 0
        self._shown = 0

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank:
            return
        self._trainer, self._first_step, self._started = trainer, trainer.step, time.perf_counter()
        self._shown = trainer.skipped
        print(headline(trainer), flush=True)
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("", total=trainer.end, completed=trainer.step)
            self._bar.start()

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._trainer is None:
            return
        if "loss" not in metrics:
            self._print(f"step {step:>5}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
            return
        line = self._line(step, metrics)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=line)
        every = self._trainer.config.log.every
        if self._bar is None and (step % every == 0 or step in (self._first_step + 1, self._trainer.end)):
            print(line, flush=True)
        if metrics["skipped"] > self._shown:
            self._shown = int(metrics["skipped"])
            reason = "no valid target" if not metrics["tokens"] else "a gradient norm that is not finite"
            self._print(f"step {step}: weights left untouched because of {reason} ({self._shown} such steps so far)")

    @hookimpl
    def femto_train_end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._trainer = None

    def _line(self, step: int, m: dict[str, float]) -> str:
        assert self._trainer is not None
        end = self._trainer.end
        elapsed = time.perf_counter() - self._started
        left = elapsed / max(1, step - self._first_step) * (end - step)
        speed = f"MFU {m['mfu']:.1%}" if "mfu" in m else f"{m['tflops']:.3f} TFLOP/s"
        return (
            f"step {step:>5}/{end}  loss {m['loss']:.4f}  norm {m['grad_norm']:.3f}  lr {m['lr']:.2e}  "
            f"{m['tokens_per_s']:,.0f} tok/s  {speed}  {m['peak_memory_mib']:,.0f} MiB  {clock(left)} left"
        )

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)


def headline(trainer: Trainer) -> str:
    """Return the lines that say what is about to be trained, on what, and where it is written."""
    config, mesh, sampler = trainer.config, trainer.mesh, trainer.loader.sampler
    count = sum(math.prod(g.layout.global_shape) for g in trainer.groups)
    owned = sum(g.layout.flat[1] - g.layout.flat[0] for g in trainer.groups)
    plugins = ", ".join(trainer.plugin_versions) or "none"
    kind = f"{trainer.stage.config.model_type} with {count:,} parameters ({owned:,} updated by rank 0)"
    rows = f"{sampler.rows:,} rows of {config.data.seq_len} tokens"
    step = f"{mesh.size('dp')} ranks x {sampler.accumulation} micro-batches x {sampler.micro_batch}"
    return "\n".join(
        [
            f"model    {kind}",
            f"layout   {mesh} on {mesh.device.type}; plugins: {plugins}",
            f"data     {rows}; {sampler.global_batch} rows a step = {step}",
            f"run      {trainer.run_dir}, steps {trainer.step + 1} to {trainer.end}",
        ]
    )


def clock(seconds: float) -> str:
    """Return `seconds` as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
