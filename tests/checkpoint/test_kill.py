"""Killed at any moment: the newest complete checkpoint loads, and the end is that of the uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def killing(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.killing", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(lives: list[dict[str, Any]], kills: int) -> None:
    killed = [life for life in lives if not life["ended"]]
    assert len(killed) == kills
    for life in lives:
        assert life["began"] == life["expected"], f"a life begins where the last one's newest checkpoint is: {life}"
        assert life["newest"] >= life["began"], f"what is complete is never lost: {life}"
        assert life.get("same", True), f"the end differs: {life}"
    assert any("same" in life for life in lives)
    assert any(life["newest"] > life["began"] for life in killed), "some lives got as far as a checkpoint"


def test_killed_a_dozen_times_a_run_ends_as_if_it_never_was(tmp_path: Path) -> None:
    check(killing(str(tmp_path), "12", "7"), 12)


@pytest.mark.slow
def test_killed_fifty_times_too(tmp_path: Path) -> None:
    lives = killing(str(tmp_path), "50", "11")
    print("\n".join(json.dumps(life) for life in lives))
    check(lives, 50)
    assert any(life["unfinished"] for life in lives), "some were killed while they wrote"


def test_the_lock_outlives_a_killed_run_by_its_loader_processes_at_most(tmp_path: Path) -> None:
    [line] = killing(str(tmp_path / "r"), "workers")
    assert line["waited_s"] < 30
