"""The mesh: which rank lies where, what is summed along which axis, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from femto_core import mesh as meshes
from femto_core.errors import UserError
from femto_core.mesh import Axis, Mesh, pick_device
from femto_core.testing import WorkerPool

CPU = torch.device("cpu")
TP = Axis("tp", 2, 100)
PP = Axis("pp", 2, 10)


def places(axes: list[Axis]) -> tuple[str, dict[str, int], dict[str, int]]:
    mesh = Mesh(axes, CPU)
    names = ("tp", "pp", "dp", "nobody's")
    return str(mesh), {n: mesh.coordinate(n) for n in names}, {n: mesh.size(n) for n in names}


def test_dp_takes_what_remains_and_a_larger_order_lies_further_inside(pool: WorkerPool) -> None:
    answers = pool.run(4, places, [TP])
    assert {text for text, _, _ in answers} == {"dp 2 x tp 2"}
    assert [(c["dp"], c["tp"]) for _, c, _ in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(sizes == {"tp": 2, "pp": 1, "dp": 2, "nobody's": 1} for _, _, sizes in answers)
    assert all(c["nobody's"] == c["pp"] == 0 for _, c, _ in answers)

    answers = pool.run(4, places, [TP, PP])
    assert {text for text, _, _ in answers} == {"pp 2 x dp 1 x tp 2"}
    assert [(c["pp"], c["dp"], c["tp"]) for _, c, _ in answers] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]

    assert {text for text, _, _ in pool.run(2, places, [])} == {"dp 2"}
    assert {text for text, _, _ in pool.run(1, places, [])} == {"dp 1"}


def sums(axes: list[Axis], calls: list[tuple[str, ...]]) -> list[float]:
    mesh = Mesh(axes, CPU)
    return [float(mesh.sum(torch.tensor(10.0**mesh.rank), *call)) for call in calls]


def test_sums_go_along_the_named_axes_only(pool: WorkerPool) -> None:
    calls = [("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"), ("nobody's",), (), ("tp", "nobody's"), ("pp",)]
    answers = pool.run(4, sums, [TP], calls)
    everybody = 1111.0
    assert answers[0] == [101, 11, everybody, everybody, 1, 1, 11, 1]
    assert answers[1] == [1010, 11, everybody, everybody, 10, 10, 11, 10]
    assert answers[2] == [101, 1100, everybody, everybody, 100, 100, 1100, 100]
    assert answers[3] == [1010, 1100, everybody, everybody, 1000, 1000, 1100, 1000]


def test_an_axis_of_one_joined_to_another_adds_nobody(pool: WorkerPool) -> None:
    wide, single = Axis("wide", 2, 60), Axis("single", 1, 70)
    answers = pool.run(4, sums, [wide, single], [("wide", "single"), ("dp", "single"), ("dp", "wide", "single")])
    assert answers == [[11, 101, 1111], [11, 1010, 1111], [1100, 101, 1111], [1100, 1010, 1111]]


def group_without_the_others() -> tuple[int, list[int]]:
    """Ask for a joint group on one rank only: were asking a collective, this would wait for the others."""
    mesh = Mesh([TP], CPU)
    if mesh.rank == 1:
        group = mesh.group("dp", "tp")
        return dist.get_world_size(group), dist.get_process_group_ranks(group)
    return 4, [0, 1, 2, 3]


def test_asking_for_a_joint_group_is_no_collective(pool: WorkerPool) -> None:
    assert pool.run(4, group_without_the_others, timeout_s=30) == [(4, [0, 1, 2, 3])] * 4


def world_calls() -> list[Any]:
    mesh = Mesh([TP], CPU)
    mesh.barrier()
    gathered = mesh.gather_objects({"rank": mesh.rank, "tensor": torch.tensor(mesh.rank)})
    return [
        mesh.world_size,
        mesh.rank,
        [item["rank"] for item in gathered],
        mesh.from_first({"said by": mesh.rank}),
        float(mesh.sum_world(torch.tensor(10.0**mesh.rank))),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_the_world_gathers_in_rank_order_and_hears_rank_0(pool: WorkerPool, size: int) -> None:
    total = sum(10.0**rank for rank in range(size))
    expected = [[size, rank, list(range(size)), {"said by": 0}, total] for rank in range(size)]
    assert pool.run(size, world_calls) == expected


def refusal(axes: list[Axis]) -> str:
    try:
        Mesh(axes, CPU)
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ([TP, Axis("tp", 1, 3)], ("different names", "tp")),
        ([Axis("dp", 2, 3)], ("none may be called dp",)),
        ([Axis("tp", 3, 100)], ("4 processes", "tp 3", "multiple of 3")),
        ([Axis("tp", 8, 100)], ("4 processes", "tp 8")),
        ([TP, Axis("pp", 4, 10)], ("tp 2 x pp 4", "multiple of 8")),
        ([Axis("tp", 0, 100)], ("tp 0",)),
        ([Axis("tp", -2, 100), Axis("pp", -2, 10)], ("tp -2",)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_refused_on_every_rank_alike(
    pool: WorkerPool, axes: list[Axis], words: tuple[str, ...]
) -> None:
    answers = pool.run(4, refusal, axes)
    assert len(set(answers)) == 1
    assert all(word in answers[0] for word in words), answers[0]


def test_without_torchrun_the_world_is_one_rank_and_every_call_works(world_of_one: None) -> None:
    mesh = Mesh([], CPU)
    assert (mesh.rank, mesh.world_size, str(mesh)) == (0, 1, "dp 1")
    value = torch.tensor([3.0])
    assert mesh.sum(value, "dp") is mesh.sum_world(value) is value
    assert value.item() == 3
    assert mesh.gather_objects("x") == ["x"]
    assert mesh.from_first("x") == "x"
    mesh.barrier()
    with pytest.raises(UserError, match="1 processes cannot be laid out as tp 2"):
        Mesh([TP], CPU)


def test_the_device_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert pick_device() == CPU


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"local rank 2 has no GPU.*has 2;.*--nproc-per-node"):
        pick_device()


def test_local_numbers_come_from_torchrun_and_default_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "3")
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", "5")
    assert (meshes.local_rank(), meshes.local_world_size()) == (3, 5)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (meshes.local_rank(), meshes.local_world_size()) == (0, 1)
