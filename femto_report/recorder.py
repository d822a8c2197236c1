"""Records of a run: config.toml, env.json, metrics.jsonl and loss.png. Rank 0 only."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from femto_core.hookspecs import hookimpl
from femto_data.atomic import open_atomic
from femto_report.jsonl import keep_lines, read_lines

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class Recorder:
    """Writes every metric of every step as one JSON object a line, and plots the loss after each evaluation."""

    def __init__(self) -> None:
        self._folder = Path()
        self._file: TextIO | None = None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank:
            return
        import tomli_w

        self._folder = trainer.run_dir
        (self._folder / "config.toml").write_text(tomli_w.dumps(trainer.config.to_dict()), encoding="utf-8")
        (self._folder / "env.json").write_text(json.dumps(environment(trainer), indent=2))
        path = self._folder / "metrics.jsonl"
        keep_lines(path, trainer.step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._file is None:
            return
        values = {"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        self._file.write(json.dumps(values) + "\n")
        if "held_out_loss" in metrics:
            plot_loss(self._folder)

    @hookimpl
    def femto_train_end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            plot_loss(self._folder)


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
    train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    held_out = [(line["step"], line["held_out_loss"]) for line in lines if line.get("held_out_loss") is not None]
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


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the exponential running mean with a weight of 0.1, corrected for its start."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        means.append(total / weight)
    return means
