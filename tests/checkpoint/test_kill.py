"""Killed at any moment, a run resumes from its newest complete checkpoint and ends like an uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Killing:
    """`python -m tests.checkpoint.killing ARGUMENTS`, under way."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.killing", *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def lives(self) -> list[dict[str, Any]]:
        """Wait for its end; return its lines."""
        out, err = self._process.communicate(timeout=600)
        assert self._process.returncode == 0, out + err
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Killing:
    """This process mostly waits for a lock, so it may run beside the other test."""
    return Killing(str(tmp_path_factory.mktemp("workers") / "r"), "workers")


def check(lives: list[dict[str, Any]], kills: int) -> None:
    killed = [life for life in lives if not life["ended"]]
    assert len(killed) == kills
    for life in lives:
        assert life["began"] == life["expected"], f"a life begins where the last one's newest checkpoint is: {life}"
        assert life["newest"] >= life["began"], f"what is complete is never lost: {life}"
        assert life.get("same", True), f"the end differs: {life}"
    assert any("same" in life for life in lives)
    assert any(life["newest"] > life["began"] for life in killed), "some lives got as far as a checkpoint"


def test_killed_a_dozen_times_a_run_ends_as_if_it_never_was(tmp_path: Path, waiting: Killing) -> None:
    check(Killing(str(tmp_path), "12", "7").lives(), 12)


@pytest.mark.slow
def test_killed_fifty_times_too(tmp_path: Path) -> None:
    lives = Killing(str(tmp_path), "50", "11").lives()
    print("\n".join(json.dumps(life) for life in lives))
    check(lives, 50)
    assert any(life["unfinished"] for life in lives), "some were killed while they wrote"


def test_the_lock_outlives_a_killed_run_by_its_loader_processes_at_most(waiting: Killing) -> None:
    [line] = waiting.lives()
    assert line["waited_s"] < 30
