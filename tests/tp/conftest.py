"""Shared by the tests of tensor parallelism: one process's run of each setting, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from femto_core.testing import RandomTask, Record, WorkerPool, assemble
from tests.tp.tools import Values, train_tp


@pytest.fixture(scope="session")
def one_process(pool: WorkerPool) -> Callable[[Values, RandomTask], Record]:
    """Train in one process without tp, on whole global batches; each setting once."""
    known: dict[str, Record] = {}

    def train(values: Values, task: RandomTask) -> Record:
        key = f"{values} {task}"
        if key not in known:
            known[key] = assemble(pool.run(1, train_tp, values, (), task))
        return known[key]

    return train
