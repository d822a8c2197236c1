"""What the README shows is true: its plugin works, its table lists what is built in."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from femto_core import hookspecs
from femto_core.hooks import Hooks
from femto_core.metrics import StepInfo
from femto_core.plugins import BUILT_IN, activate, installed_plugins
from femto_tools.testing import QUIET

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_plugin_in_the_readme_takes_its_seat_and_observes(capsys: pytest.CaptureFixture[str]) -> None:
    [source] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    plugin = ModuleType("mine")
    exec(source, vars(plugin))
    hooks = Hooks(activate(QUIET, objects={"mine": plugin}).manager)
    config: Any = SimpleNamespace(optim=SimpleNamespace(warmup=3))
    schedule = hooks.seat(hookspecs.femto_lr_schedule, config=config)
    assert [round(schedule(step), 3) for step in (0, 3, 15)] == [0.25, 1.0, 0.5]
    info = StepInfo(step=7, loss=1.0, grad_norm=11.0, lr=0.1, tokens=8, skipped=False, skipped_total=0, seconds=1.0)
    trainer: Any = SimpleNamespace()
    hooks.call(hookspecs.femto_step_end, trainer=trainer, info=info)
    assert "step 7: gradient norm 11.0" in capsys.readouterr().out


def test_the_table_of_plugins_lists_what_is_installed() -> None:
    rows = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    own = [
        name
        for name, entry in installed_plugins().items()
        if entry.dist is not None and entry.dist.name == "femto-core"
    ]
    for name in (*BUILT_IN, *own):
        assert f"`{name}`" in rows


def test_every_file_that_the_readme_points_to_exists() -> None:
    root = Path(__file__).parents[2]
    for path in re.findall(r"`((?:docs|examples)/[\w./-]+)`", README):
        assert (root / path).exists(), path
