"""Progress of a run: a live bar on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from femto_core.hookspecs import hookimpl
from femto_core.sections import positive
from femto_report.writing import say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from femto_core.trainer import Trainer


LEAST_FIRST = (5, 2, 3, 6, 4, 7, 1)
"""The places of the fields of a live line, from the one that a narrow terminal misses least."""
SHORTEST_BAR, LONGEST_BAR = 10, 40


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
            from rich.progress import Progress, TextColumn
            from rich.table import Column

            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            self._bar = Progress(text)
            self._task = self._bar.add_task("", total=trainer.end, completed=trainer.step)
            self._bar.start()

    @hookimpl
    def femto_log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if "loss" not in metrics:
            self._print(f"step {step:>5}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
            return
        left_s = (time.perf_counter() - self._started) / max(1, step - self._first_step) * (trainer.end - step)
        fields = fields_of(step, trainer.end, metrics, left_s)
        if self._bar is not None and self._task is not None:
            line = live_line(fields, step / trainer.end, self._bar.console.width - 1)
            self._bar.update(self._task, completed=step, description=line)
        every = trainer.config.section(LogSection).every
        if self._bar is None and (step % every == 0 or step in (self._first_step + 1, trainer.end)):
            say("  ".join(fields))
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
            saved = f", saved in {trainer.run_dir / 'checkpoints' / f'step-{trainer.step}'}"
            kept = saved if trainer.config.checkpoint.every else "; nothing is saved, because checkpoint.every = 0"
            with contextlib.suppress(OSError):
                print(f"interrupted after step {trainer.step}{kept}", file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            say(line)


def fields_of(step: int, end: int, m: dict[str, float], left_s: float) -> list[str]:
    """Return what is shown of a step with the metrics `m`; `left_s` are the seconds until the last."""
    return [
        f"step {step:>5}/{end}",
        f"loss {m['loss']:.4f}",
        f"norm {m['grad_norm']:.3f}",
        f"lr {m['lr']:.2e}",
        f"{m['tokens_per_s']:,.0f} tok/s",
        f"MFU {m['mfu']:.1%}" if "mfu" in m else f"{m['tflops']:.3f} TFLOP/s",
        f"{m['peak_memory_mib']:,.0f} MiB",
        f"{clock(left_s)} left",
    ]


def live_line(fields: Sequence[str], done: float, width: int) -> str:
    """Return the `fields` that fit `width` columns, in their order, after a bar of `done` where it fits.

    What matters less goes first; the step stays, cut where it must be.
    """
    kept = list(fields)
    for place in LEAST_FIRST:
        if len("  ".join(kept)) > width:
            kept.remove(fields[place])
    line = "  ".join(kept)
    cells = min(LONGEST_BAR, width - len(line) - len("[]  "))
    if cells < SHORTEST_BAR:
        return line[: max(0, width)]
    full = int(done * cells)
    return f"[{'#' * full}{'.' * (cells - full)}]  {line}"


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
