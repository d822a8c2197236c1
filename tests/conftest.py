"""What all tests share: one pool of workers for the whole session, and a model with dropout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel
from femto_core.testing import RandomTask, WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four workers. A job that fails ends them, and the next one starts new ones: expected errors are caught inside."""
    workers = WorkerPool(4)
    yield workers
    workers.close()


class DropoutTask(RandomTask):
    """Random rows, and attention that drops a third of its weights while it trains."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for module in model.module.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
