"""The commands in the documents, and a way to execute them that does not load torch for each."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from femto_core.hookspecs import hookimpl

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/*.md", "plugins/*/README.md", "examples/**/README.md")
    for path in ROOT.glob(pattern)
)
PROGRAMS = ("femto", "torchrun", "python", "make", "pip")
TIMEOUT_S = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["femto_core.build", "transformers.models.llama.modeling_llama", __name__])


def commands_in(document: str) -> list[list[str]]:
    """Return the words of each command that a document shows, on a line of its own or within a sentence."""
    text = (ROOT / document).read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", prose, flags=re.MULTILINE))
    found = [shlex.split(line, comments=True) for line in indented if line.split()[0] in PROGRAMS]
    return found + [shlex.split(code) for code in inline if code.split()[0] in PROGRAMS and len(code.split()) > 1]


class Small:
    """A plugin that makes a run small where the command says nothing else."""

    def __init__(self, data: str) -> None:
        self._data = data

    @hookimpl
    def femto_config_defaults(self) -> Mapping[str, Mapping[str, Any]]:
        model = {"hidden_size": 16, "intermediate_size": 32, "layers": 4, "heads": 2, "kv_heads": 2}
        data = {"seq_len": 16 if self._data else 64, "global_batch": 8, "path": self._data}
        return {
            "model": model,
            "data": {key: value for key, value in data.items() if value},
            "train": {"steps": 2, "threads": 1},
            "optim": {"warmup": 1},
            "eval": {"every": 0},
            "sample": {"tokens": 2},
        }


@attrs.frozen
class Ended:
    """How a command's processes ended, and what they said."""

    codes: list[int | None]
    said: str


def execute(words: Sequence[str], cwd: Path, *, data: str, processes: int = 1) -> Ended:
    """Run `femto WORDS` in `cwd` on `processes` ranks, forked from a process that has loaded torch; `data`: rows."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs = [cwd / f"rank-{rank}.txt" for rank in range(processes)]
    ranks: list[Any] = []
    for rank, output in enumerate(outputs):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        world = {k: str(v) for k, v in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, "HOME": str(cwd), "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        environment |= world if processes > 1 else {}
        arguments = (list(words), str(cwd), environment, str(output), data)
        ranks.append(_context.Process(target=_femto, args=arguments))
        ranks[-1].start()
    for process in ranks:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return Ended(codes, "".join(output.read_text(encoding="utf-8", errors="replace") for output in outputs))


def _femto(words: list[str], cwd: str, environment: dict[str, str], output: str, data: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, cwd)  # where the document's own plugins are installed
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process
    sys.argv = ["femto", *words]
    from femto_core import plugins
    from femto_core.cli import main

    sys.modules["small"] = Small(data)  # type: ignore[assignment]
    plugins.BUILT_IN["small"] = "small"
    main(words)
