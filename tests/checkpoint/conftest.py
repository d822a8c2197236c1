"""Shared by the tests of checkpoints: the long ones run only when asked for by `-m slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from femto_core.testing import WorkerPool
from tests.checkpoint.runs import train_until, values


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs only with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in str(config.getoption("markexpr")):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="runs only with -m slow"))


@pytest.fixture(scope="module")
def good(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoint of step 2, saved by two ranks."""
    folder: Path = tmp_path_factory.mktemp("good")
    pool.run(2, train_until, values(folder, checkpoint={"keep": 1}), 2)
    return folder
