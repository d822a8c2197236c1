"""Records of a run: config.toml, env.json, metrics.jsonl and loss.png. Rank 0 only."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_data.atomic import open_atomic, write_atomic
from femto_report.jsonl import LineFile, keep_lines, read_lines
from femto_report.writing import Writing, check_places

if TYPE_CHECKING:
    from femto_core.trainer import Trainer

FILES = ("config.toml", "env.json", "metrics.jsonl", "samples.jsonl", "loss.png")
FOLDERS = ("logs",)


class Recorder:
    """Writes every metric of every step as one JSON object a line, and plots the loss after each evaluation."""

    def __init__(self) -> None:
        self._folder = Path()
        self._file: LineFile | None = None
        self._writing = Writing()

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if problem := trainer.mesh.from_first("" if trainer.mesh.rank else self._begin(trainer)):
            raise UserError(problem)

    def _begin(self, trainer: Trainer) -> str:
        """Write the records of a beginning, and open metrics.jsonl; return what is wrong with the folder, if so."""
        import tomli_w

        self._folder, self._writing = trainer.run_dir, Writing()
        if problem := check_places(self._folder, FILES, FOLDERS):
            return problem
        for name, text in (
            ("config.toml", tomli_w.dumps(trainer.config.to_dict())),
            ("env.json", json.dumps(environment(trainer), indent=2)),
        ):
            with self._writing.to(self._folder / name):
                write_atomic(self._folder / name, text)
        path = self._folder / "metrics.jsonl"
        try:
            with self._writing.to(path):
                keep_lines(path, trainer.step)
                self._file = LineFile(path)
        except UserError as error:
            return str(error)
        return ""

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        values = {"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        with self._writing.to(self._folder / "metrics.jsonl"):
            self._file.append(values)
        if "held_out_loss" in metrics:
            self._plot()

    @hookimpl
    def femto_train_end(self) -> None:
        if self._file is not None:
            with self._writing.to(self._folder / "metrics.jsonl"):
                self._file.close()
            self._file = None
            self._plot()

    def _plot(self) -> None:
        path = self._folder / "loss.png"
        try:
            with self._writing.to(path):
                plot_loss(self._folder)
        except UserError as error:  # metrics.jsonl has been written to by another
            self._writing.failed(path, error)


def environment(trainer: Trainer) -> dict[str, Any]:
    """Return versions, device, layout and command: the circumstances of the run."""
    import torch
    import transformers

    device = trainer.mesh.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "layout": str(trainer.mesh),
        "plugins": trainer.plugin_versions,
        "command": sys.argv,
    }


def plot_loss(folder: Path) -> None:
    """Draw loss.png from metrics.jsonl: training loss, its running mean, and held-out loss, over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: its state is global, and may want a screen
    from matplotlib.figure import Figure

    lines = read_lines(folder / "metrics.jsonl")
    train, held_out = points(lines, "loss"), points(lines, "held_out_loss")
    if not train:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = zip(*train, strict=True)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
    axes.plot(steps, running_mean(losses), color="tab:blue", linewidth=1.5, label="training, running mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", markersize=4, label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with open_atomic(folder / "loss.png") as file:
        figure.savefig(file, format="png", dpi=120)


def points(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return the steps and values of metric `name`, without those that are no number."""
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the exponential running mean with a weight of 0.1, corrected for its start."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        means.append(total / weight)
    return means
