"""Shared by the tests of pipelines: one process's run of each setting, once; long tests only with `-m slow`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from femto_core.testing import RandomTask, Record, WorkerPool, assemble, train_job
from tests.pp.tasks import Values


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs only with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in str(config.getoption("markexpr")):
        for item in items:
            if item.get_closest_marker("slow") and Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="runs only with -m slow"))


@pytest.fixture(scope="session")
def one_process(pool: WorkerPool) -> Callable[[Values, RandomTask], Record]:
    """Train in one process without plugins; each setting once."""
    known: dict[str, Record] = {}

    def train(values: Values, task: RandomTask) -> Record:
        key = f"{values} {task}"
        if key not in known:
            known[key] = assemble(pool.run(1, train_job, values, (), task))
        return known[key]

    return train
