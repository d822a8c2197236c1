"""Shared by the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from femto_tools.testing import WorkerPool
from tests.checkpoint.runs import train_until, values


@pytest.fixture(scope="module")
def good(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoint of step 2, saved by two ranks."""
    folder: Path = tmp_path_factory.mktemp("good")
    pool.run(2, train_until, values(folder, checkpoint={"keep": 1}), 2)
    return folder
