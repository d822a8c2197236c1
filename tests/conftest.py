"""What all tests share: a pool of workers for the whole session, a world of one rank, a model with dropout.

Those marked `slow` run only when asked for, by `-m slow`; so do all but one in n cases of a test marked `one_in(n)`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from femto_core.hookspecs import hookimpl
from femto_core.launch import init_process_group
from femto_core.layout import ParamLayout
from femto_core.model import FullModel
from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, train_job


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs only with -m slow")
    config.addinivalue_line("markers", "one_in(n): of its cases only every n-th runs without -m slow, taken at random")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        [n] = same[0].get_closest_marker("one_in").args  # type: ignore[union-attr]
        by_chance = sorted(same, key=lambda item: zlib.crc32(item.nodeid.encode()))  # the same ones every time
        for item in by_chance[math.ceil(len(same) / n) :]:
            item.add_marker("slow")
    if "slow" not in str(config.getoption("markexpr")):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="runs only with -m slow"))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four workers. A job that fails ends them, and the next one starts new ones: expected errors are caught inside."""
    workers = WorkerPool(4)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def large_pool() -> Iterator[WorkerPool]:
    """Eight workers, for as long as the module's tests run."""
    workers = WorkerPool(8)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def one_process(pool: WorkerPool) -> Callable[[Mapping[str, Any], RandomTask], Record]:
    """Train in one process without plugins; each setting once."""
    known: dict[str, Record] = {}

    def train(values: Mapping[str, Any], task: RandomTask) -> Record:
        key = f"{values} {task}"
        if key not in known:
            known[key] = assemble(pool.run(1, train_job, values, (), task))
        return known[key]

    return train


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, as without torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    init_process_group(torch.device("cpu"))
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
    torch.set_rng_state(random_state)


def read_flat(tensor: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """Cut what `layout` owns out of the global `tensor`, as a vector."""
    parts = [tensor[box.slices()].reshape(-1) for box in layout.owned()]
    return torch.cat(parts) if parts else tensor.new_empty(0)


class DropoutTask(RandomTask):
    """Random rows, and attention that drops a third of its weights while it trains."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for module in model.module.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
