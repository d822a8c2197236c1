"""Progress of a run: a live bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

import attrs

from femto_core.hookspecs import hookimpl
from femto_core.sections import positive
from femto_report.writing import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from femto_core.trainer import Trainer


@attrs.frozen(kw_only=True)
class LogSection:
    """Lines that are shown during a run."""

    every: int = attrs.field(default=10, validator=positive)
    """Steps between printed lines where there is no terminal; metrics.jsonl has every step."""


class ProgressReport:
    """Shows loss, gradient norm, learning rate, speed, memory and time left."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started, self._first_step = 0.0, 0
        self._shown = 0

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[LogSection]]:
        return "log", LogSection

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank:
            return
        self._first_step, self._started = trainer.step, time.perf_counter()
        self._shown = trainer.skipped
        say(headline(trainer))
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("", total=trainer.end, completed=trainer.step)
            self._bar.start()

    @hookimpl
    def femto_log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if "loss" not in metrics:
            self._print(f"step {step:>5}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
            return
        line = self._line(step, trainer.end, metrics)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=line)
        every = trainer.config.section(LogSection).every
        if self._bar is None and (step % every == 0 or step in (self._first_step + 1, trainer.end)):
            say(line)
        if metrics["skipped"] > self._shown:
            self._shown = int(metrics["skipped"])
            reason = "no valid target" if not metrics["tokens"] else "a gradient norm that is not finite"
            self._print(f"step {step}: weights left untouched because of {reason} ({self._shown} such steps so far)")

    @hookimpl
    def femto_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        if error is None and trainer.step < trainer.end and trainer.mesh.rank == 0:
            kept = (
                "its checkpoint is saved"
                if trainer.config.checkpoint.every
                else "nothing is saved, because checkpoint.every = 0"
            )
            print(f"stopped after step {trainer.step}, as asked; {kept}", file=sys.stderr, flush=True)

    def _line(self, step: int, end: int, m: dict[str, float]) -> str:
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
            say(line)


def headline(trainer: Trainer) -> str:
    """Return the lines that describe a run: its model, layout, data and folder."""
    mesh, data = trainer.mesh, trainer.config.data
    count = sum(math.prod(share.layout.global_shape) for share in trainer.shares)
    owned = sum(share.layout.flat[1] - share.layout.flat[0] for share in trainer.shares)
    plugins = ", ".join(trainer.plugin_versions) or "none"
    kind = f"{trainer.stage.config.model_type} with {count:,} parameters ({owned:,} updated by rank 0)"
    rows = f"{len(trainer.dataset):,} rows of {data.seq_len} tokens"
    ranks = mesh.size(*mesh.row_axes)
    step = f"{ranks} ranks x {trainer.loader.accumulation} micro-batches x {data.micro_batch}"
    return "\n".join(
        [
            f"model    {kind}",
            f"layout   {mesh} on {mesh.device.type}; plugins: {plugins}",
            f"data     {rows}; {data.global_batch} rows a step = {step}",
            f"run      {trainer.run_dir}, steps {trainer.step + 1} to {trainer.end}",
        ]
    )


def clock(seconds: float) -> str:
    """Return `seconds` as m:ss or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
