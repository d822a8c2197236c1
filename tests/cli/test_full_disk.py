"""What observers cannot write is said once, and training goes on; a checkpoint that cannot be written ends the run."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from femto_core.hookspecs import hookimpl
from femto_core.trainer import Trainer
from tests.cli.commands import TINY_FLAGS, Finished, forked, world

RUN = Path("runs/r")


@attrs.frozen
class FullDisk:
    """From the end of step `step` on, no file may have more than `size` bytes."""

    step: int
    size: int

    @hookimpl(tryfirst=True)
    def femto_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


def run(dataset: Path, cwd: Path, flags: Sequence[str], plugin: object, ranks: int = 1) -> list[Finished]:
    words = [*TINY_FLAGS, "--data.path", str(dataset), "--run.name", "r", *flags]
    return forked(words, cwd, world(ranks) if ranks > 1 else [{}], {"disk": plugin})


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_observers_that_cannot_write_warn_once_and_training_goes_on(ranks: int, dataset: Path, tmp_path: Path) -> None:
    flags = ("--train.steps", "8", "--eval.every", "2", "--sample.every", "2", "--profile.step", "5")
    done = run(dataset, tmp_path, flags, FullDisk(4, 1500), ranks)
    assert [one.code for one in done] == [0] * ranks, done
    warnings = [line for line in done[0].err.splitlines() if line.startswith("WARNING")]
    names = ("loss.png", "metrics.jsonl", "trace-rank-0.json")
    assert sorted(line.split()[1] for line in warnings) == [str(RUN / name) for name in names]
    assert (
        f"WARNING  {RUN}/metrics.jsonl cannot be written: [Errno 27] File too large; training goes on without it"
        in (warnings)
    )
    assert all("Traceback" not in one.err for one in done)
    folder = tmp_path / RUN
    assert (folder / "loss.png").read_bytes().endswith(b"IEND\xaeB`\x82"), "the plot of step 2, whole"
    assert steps_in(folder / "metrics.jsonl")[:2] == [1, 2]
    assert len(steps_in(folder / "metrics.jsonl")) < 12, "whole lines only"
    assert set(steps_in(folder / "samples.jsonl")) == {0, 2, 4, 6, 8}
    assert not [path.name for path in folder.rglob("*") if "partial" in path.name or "trace" in path.name]


def test_the_disk_may_be_full_from_the_start(dataset: Path, tmp_path: Path) -> None:
    words = [*TINY_FLAGS, "--data.path", str(dataset), "--run.name", "r", "--eval.every", "2"]
    command = f"ulimit -f 1; exec {sys.executable} -m femto_core {shlex.join(words)}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warned = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert str(RUN / "loss.png") in warned, done.stderr
    assert len(warned) == len(set(warned))
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "step     4/4" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(ranks: int, dataset: Path, tmp_path: Path) -> None:
    done = run(dataset, tmp_path, ("--checkpoint.every", "2", "--checkpoint.wait"), FullDisk(3, 3000), ranks)
    assert [one.code for one in done] == [2] * ranks, done
    assert "File too large" in done[0].err
    assert "checkpoint" in done[0].err
    assert all("Traceback" not in one.err for one in done)
    assert [path.name for path in (tmp_path / RUN / "checkpoints").glob("step-*")] == ["step-2"]


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "mine").write_text("kept")


LEFT: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "other bytes": (
        "metrics.jsonl",
        lambda path: path.write_bytes(b"\xff\xfe\x00binary\n{}\n"),
        "metrics.jsonl, line 1: not a JSON object with a step, as femto writes it; move the file away",
    ),
    "another's JSON": (
        "metrics.jsonl",
        lambda path: path.write_text('{"step": 1}\n[1, 2]\n{"step": 2}\n'),
        "metrics.jsonl, line 2: not a JSON object with a step",
    ),
    "deep brackets": ("metrics.jsonl", lambda path: path.write_text("[" * 10**5), "metrics.jsonl, line 1: not a JSON"),
    "other samples": ("samples.jsonl", lambda path: path.write_text("hello\n"), "samples.jsonl, line 1: not a JSON"),
    "a folder of metrics": ("metrics.jsonl", make_folder, "metrics.jsonl must be a file, and is none; move it away"),
    "a folder of settings": ("config.toml", make_folder, "config.toml must be a file, and is none; move it away"),
    "a file of logs": (
        "logs",
        lambda path: path.write_text("mine"),
        "logs must be a folder, and is none; move it away",
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_femtos_is_neither_overwritten_nor_a_traceback(ranks: int, dataset: Path, tmp_path: Path) -> None:
    """All cases in one run's folder, one after the other."""
    folder = tmp_path / RUN
    for name, make, said in LEFT.values() if ranks == 1 else [LEFT["another's JSON"], LEFT["a file of logs"]]:
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / name)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        done = run(dataset, tmp_path, ("--checkpoint.resume", "auto", "--sample.tokens", "1"), Nothing(), ranks)
        assert done[0].code == 2, done
        assert said in done[0].err, done[0].err
        assert done[0].err.count("\n") == 1, done[0].err
        assert all(
            path.read_bytes() == content for path, content in before.items() if path.name == name or "mine" in path.name
        )
        shutil.rmtree(folder)


class Nothing:
    """No hook."""
