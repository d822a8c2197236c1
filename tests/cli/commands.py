"""Running femto as a user does: in processes of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

TINY_FLAGS = (
    *("--model.hidden-size", "16", "--model.intermediate-size", "32", "--model.layers", "1"),
    *("--model.heads", "2", "--model.kv-heads", "1", "--data.seq-len", "16", "--data.global-batch", "4"),
    *("--train.steps", "4", "--optim.warmup", "1", "--eval.every", "0", "--sample.tokens", "2", "--train.threads", "1"),
)
TIMEOUT_S = 180
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["femto_tools.testing", "transformers.models.llama.modeling_llama"])


@attrs.frozen
class Finished:
    """How a command ended, and what it said."""

    code: int | None
    out: str
    err: str


def femto(arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, processes: int = 0) -> Finished:
    """Run `femto ARGUMENTS` in `cwd`, under torchrun where `processes` are asked for."""
    if not processes:
        [finished] = forked(arguments, cwd, [{**(env or {})}])
        return finished
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    done = subprocess.run(
        [*launcher, "femto_core", *arguments],
        cwd=cwd,
        env=environment(env or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def forked(
    arguments: Sequence[str], cwd: Path, envs: Sequence[Mapping[str, str]], built_in: Mapping[str, object] | None = None
) -> list[Finished]:
    """Run `femto ARGUMENTS` once for each of `envs`, at once, in processes forked from one that has loaded torch.

    `built_in` are objects to register as further built-in plugins.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder) / f"{number}.out", Path(folder) / f"{number}.err") for number in range(len(envs))]
        processes: list[Any] = [
            _context.Process(
                target=_run,
                args=(list(arguments), str(cwd), environment(env), str(out), str(err), dict(built_in or {})),
            )
            for env, (out, err) in zip(envs, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        texts = [[file.read_text(encoding="utf-8", errors="replace") for file in pair] for pair in outputs]
    return [Finished(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


def world(size: int) -> list[dict[str, str]]:
    """Return what torchrun sets for each of `size` ranks of a world on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    all_alike = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**all_alike, "RANK": rank, "LOCAL_RANK": rank} for rank in range(size)]
    return [{name: str(value) for name, value in place.items()} for place in places]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a quiet run on one thread, with `more` in it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", **more}


def _run(words: list[str], cwd: str, env: dict[str, str], out: str, err: str, built_in: dict[str, object]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["femto", *words]
    from femto_core import plugins
    from femto_core.cli import main

    for name, plugin in built_in.items():
        sys.modules[name] = plugin  # type: ignore[assignment]
        plugins.BUILT_IN[name] = name
    main(words)


def install_plugin(site: Path, name: str, source: str, cls: str = "") -> dict[str, str]:
    """Write a plugin and its metadata into `site` as pip would; return the environment in which it is installed.

    The plugin is the module itself, or its class `cls`.
    """
    module = f"plugin_{name}"
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[femto.plugins]\n{name} = {module}{cls and f':{cls}'}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}
