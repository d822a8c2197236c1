"""Running femto as a user does: in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

TINY_FLAGS = (
    *("--model.hidden-size", "16", "--model.intermediate-size", "32", "--model.layers", "1"),
    *("--model.heads", "2", "--model.kv-heads", "1", "--data.seq-len", "16", "--data.global-batch", "4"),
    *("--train.steps", "4", "--optim.warmup", "1", "--eval.every", "0", "--sample.tokens", "2", "--train.threads", "1"),
)


@attrs.frozen
class Finished:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def femto(arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, processes: int = 0) -> Finished:
    """Run `femto ARGUMENTS` in `cwd`, under torchrun where `processes` are asked for."""
    launcher = [sys.executable, "-m"]
    if processes:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **(env or {})}
    done = subprocess.run(
        [*launcher, "femto_core", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def install_plugin(site: Path, name: str, source: str) -> dict[str, str]:
    """Write a plugin and its metadata into `site` as pip would; return the environment in which it is installed."""
    module = f"plugin_{name}"
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[femto.plugins]\n{name} = {module}\n")
    return {"PYTHONPATH": str(site)}
