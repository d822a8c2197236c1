"""What happens to a run when the world interferes: torchrun restarts it, a scheduler asks it to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import TINY_FLAGS, femto, install_plugin

DIES_ONCE = """
import os
from pathlib import Path
from femto_core.hookspecs import hookimpl

@hookimpl
def femto_step_begin(step):
    mark = Path("died")
    if step == 3 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
"""


def metrics(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def start(arguments: list[str], cwd: Path, env: dict[str, str], *torchrun: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *torchrun, "-m"]
    return subprocess.Popen(
        [*launcher, "femto_core", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_torchruns_restart_goes_on_from_the_newest_checkpoint(dataset: Path, tmp_path: Path) -> None:
    environment = install_plugin(tmp_path / "site", "dies_once", DIES_ONCE)
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--checkpoint.every", "1", "--checkpoint.resume", "auto"]
    whole = start([*flags, "--run.name", "whole"], tmp_path, environment)
    _, err = whole.communicate(timeout=180)
    assert whole.returncode == 0, err
    killed = start([*flags, "--run.name", "r", "--plugins", "dies_once"], tmp_path, environment, "--max-restarts", "1")
    out, err = killed.communicate(timeout=180)
    assert killed.returncode == 0, err
    assert (tmp_path / "died").exists()
    assert "steps 1 to 4" in out
    assert "steps 2 to 4" in out or "steps 3 to 4" in out, "the second start resumed"
    assert metrics(tmp_path / "runs" / "r") == metrics(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_cleanly_and_the_run_goes_on_later(
    number: signal.Signals, dataset: Path, tmp_path: Path
) -> None:
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--train.steps", "100000", "--checkpoint.every", "1000000"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "femto_core",
            *flags,
            "--run.name",
            "r",
            "--log.every",
            "1",
            "--optim.schedule",
            "constant",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step     5/"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    done = metrics(tmp_path / "runs" / "r")[-1][0]
    assert err == f"interrupted after step {done}, saved in runs/r/checkpoints/step-{done}\n"
    saved = [p.name for p in (tmp_path / "runs" / "r" / "checkpoints").glob("step-*")]
    assert saved == [f"step-{done}"]
    later = [*flags, "--optim.schedule", "constant", "--run.name", "r", "--train.stop-after", str(done + 2)]
    resumed = femto([*later, "--checkpoint.resume", "auto"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert [step for step, *_ in metrics(tmp_path / "runs" / "r")] == list(range(1, done + 3))
