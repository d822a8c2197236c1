"""The commands in the documents, and a way to execute them that does not load torch for each."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from femto_core.hookspecs import hookimpl
from tests.cli.commands import forked, world

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/*.md", "plugins/*/README.md", "examples/**/README.md")
    for path in ROOT.glob(pattern)
)
PROGRAMS = ("femto", "torchrun", "python", "make", "pip")


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


def execute(words: Sequence[str], cwd: Path, *, data: str, processes: int = 1) -> tuple[list[int | None], str]:
    """Run `femto WORDS` in `cwd` on `processes` ranks, small, on rows `data`; return exit codes and what was said."""
    home = {"HOME": str(cwd), "PYTHONPATH": os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")])}
    envs = [{**home, **place} for place in (world(processes) if processes > 1 else [{}])]
    ended = forked(words, cwd, envs, {"small": Small(data)})
    return [one.code for one in ended], "".join(one.out + one.err for one in ended)
