"""The mesh: which rank lies where, what is summed along which axis, and what is refused."""

from __future__ import annotations

import itertools
import os
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from femto_core import launch
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.launch import pick_device
from femto_core.mesh import SPLITS, Axis, Mesh
from femto_tools.testing import RandomTask, WorkerPool, make_trainer

CPU = torch.device("cpu")
TP = Axis("tp", 2, 100, "nothing")
PP = Axis("pp", 2, 10, "nothing")


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
    wide, single = Axis("wide", 2, 60, "nothing"), Axis("single", 1, 70, "nothing")
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


# Which batches the ranks of an axis see.

SHARD, REPLICA = Axis("shard", 2, 60, "rows"), Axis("replica", 2, 40, "rows")
CP = Axis("cp", 2, 70, "tokens")
MIXED = [
    pytest.param(4, [SHARD, CP], id="rows 2, tokens 2, dp 1"),
    pytest.param(4, [CP], id="dp 2, tokens 2"),
    pytest.param(4, [TP, CP], id="tokens 2, nothing 2, dp 1"),
    pytest.param(8, [REPLICA, CP], id="rows 2, dp 2, tokens 2"),
    pytest.param(8, [TP, SHARD, CP], id="rows 2, tokens 2, nothing 2, dp 1"),
    pytest.param(8, [PP, CP, TP], id="nothing 2, tokens 2, nothing 2, dp 1"),
]


@pytest.mark.parametrize("splits", SPLITS)
def test_an_axis_may_split_rows_tokens_or_nothing(splits: str) -> None:
    assert Axis("mine", 2, 1, splits).splits == splits


@pytest.mark.parametrize(
    ("splits", "hint"),
    [("token", "; did you mean 'tokens'?"), ("Rows", "; did you mean 'rows'?"), ("qqq", ""), ("", "")],
)
def test_an_axis_that_splits_anything_else_is_refused_in_one_sentence(splits: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        Axis("mine", 2, 1, splits)
    assert str(refused.value) == (
        f"mesh axis 'mine' splits {splits!r}{hint}; an axis splits one of nothing, rows, tokens"
    )


@attrs.frozen
class Seen:
    """What a mesh says to one rank."""

    row_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    data_axes: tuple[str, ...]
    speaks: bool
    coordinates: dict[str, int]
    numbers: dict[tuple[str, ...], tuple[int, int]]
    """Coordinate and size, by axes together."""
    sums: dict[tuple[str, ...], float]
    """Sums of 10 ** rank, by axes together."""


def look(axes: list[Axis]) -> Seen:
    mesh = Mesh(axes, CPU)
    names = [axis.name for axis in mesh.axes]
    orders = [some for n in range(1, len(names) + 1) for some in itertools.permutations(names, n)]
    return Seen(
        row_axes=mesh.row_axes,
        token_axes=mesh.token_axes,
        data_axes=mesh.data_axes,
        speaks=mesh.speaks,
        coordinates={name: mesh.coordinate(name) for name in names},
        numbers={some: (mesh.coordinate(*some), mesh.size(*some)) for some in orders},
        sums={some: float(mesh.sum(torch.tensor(10.0**mesh.rank, dtype=torch.float64), *some)) for some in orders},
    )


@pytest.mark.parametrize(("size", "axes"), MIXED)
def test_a_mesh_knows_which_axes_split_rows_and_which_tokens(
    large_pool: WorkerPool, size: int, axes: list[Axis]
) -> None:
    answers = large_pool.run(size, look, axes)
    ordered = sorted([*axes, Axis("dp", 0, 50, "rows")], key=lambda axis: axis.order)
    for seen in answers:
        assert seen.row_axes == tuple(axis.name for axis in ordered if axis.splits == "rows")
        assert seen.token_axes == tuple(axis.name for axis in ordered if axis.splits == "tokens")
        assert seen.data_axes == tuple(axis.name for axis in ordered if axis.splits != "nothing")
        repeats = [axis.name for axis in axes if axis.splits == "nothing"]
        assert seen.speaks == all(seen.coordinates[name] == 0 for name in repeats)
    speakers = [seen for seen in answers if seen.speaks]
    numbers = [seen.numbers[seen.data_axes][0] for seen in speakers]
    assert sorted(numbers) == list(range(answers[0].numbers[answers[0].data_axes][1])), "each token has one speaker"


@pytest.mark.parametrize(("size", "axes"), MIXED)
def test_any_axes_together_make_one_group_of_the_ranks_that_differ_only_along_them(
    large_pool: WorkerPool, size: int, axes: list[Axis]
) -> None:
    answers = large_pool.run(size, look, axes)
    for some, (_, count) in answers[0].numbers.items():
        for seen in answers:
            mates = [
                rank
                for rank, other in enumerate(answers)
                if all(other.coordinates[name] == at for name, at in seen.coordinates.items() if name not in some)
            ]
            assert len(mates) == count
            assert seen.sums[some] == sum(10.0**rank for rank in mates), some
            assert sorted(answers[rank].numbers[some][0] for rank in mates) == list(range(count))
            last = some[-1]
            if answers[0].numbers[(last,)][1] == count:
                assert seen.numbers[some][0] == seen.coordinates[last]
            elif seen.coordinates[last] == 0 and answers[0].numbers[(last,)][1] == 2:
                assert seen.numbers[some][0] % 2 == 0, "the last axis varies fastest"


# Axes of some ranks only.


def shared_by_both_ends() -> tuple[list[float], list[int], bool]:
    """On pp 2 x dp 2 x cp 2 the first of the data ranks' ends share a weight with the last."""
    mesh = Mesh([PP, CP], CPU)
    mesh.add_axis("tied", mesh.lines("pp"))
    group = mesh.group("tied")
    groups = dist.distributed_c10d._world.group_count
    mesh.add_axis("tied", mesh.lines("pp"))
    same = mesh.group("tied") is group and dist.distributed_c10d._world.group_count == groups
    calls = [("tied",), ("dp", "tied"), ("tied", "cp"), ("cp", "tied", "dp"), ("dp",)]
    sums = [float(mesh.sum(torch.tensor(2.0**mesh.rank), *call)) for call in calls]
    return sums, [mesh.size("tied"), mesh.size("tied", "dp")], same


def test_an_added_axis_is_summed_over_alone_and_with_any_data_axes(large_pool: WorkerPool) -> None:
    def bits(*ranks: int) -> float:
        return float(sum(2**rank for rank in ranks))

    for rank, (sums, sizes, same) in enumerate(large_pool.run(8, shared_by_both_ends)):
        dp, cp = rank // 2 % 2, rank % 2
        assert sums == [
            bits(rank % 4, rank % 4 + 4),
            bits(cp, cp + 2, cp + 4, cp + 6),
            bits(2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5),
            bits(*range(8)),
            bits(4 * (rank // 4) + cp, 4 * (rank // 4) + cp + 2),
        ]
        assert sizes == [2, 4]
        assert same, "adding the same axis again makes no group"


def partly_shared() -> tuple[int, float, float]:
    mesh = Mesh([Axis("pp", 4, 10, "nothing")], CPU)
    mesh.add_axis("tied", [[0, 3]])
    alone, with_dp = (float(mesh.sum(torch.tensor(10.0**mesh.rank), *axes)) for axes in (("tied",), ("dp", "tied")))
    return mesh.size("tied"), alone, with_dp


def test_ranks_that_do_not_lie_on_an_added_axis_are_alone_on_it(pool: WorkerPool) -> None:
    assert pool.run(4, partly_shared) == [(2, 1001, 1001), (1, 10, 10), (1, 100, 100), (2, 1001, 1001)]


def wrong_additions() -> list[str]:
    mesh, said = Mesh([PP], CPU), []
    mesh.add_axis("tied", [[0, 1]])
    for name, lists in (("tied", [[0], [1]]), ("dp", [[0, 1]]), ("pp", [[0, 1]])):
        try:
            mesh.add_axis(name, lists)
        except ValueError as error:
            said.append(str(error))
    return said


def test_another_axis_of_the_same_name_is_refused(pool: WorkerPool) -> None:
    tied, dp, pp = pool.run(2, wrong_additions)[1]
    assert tied == "mesh axis 'tied' was added before, along other ranks"
    assert dp == "the mesh has an axis 'dp' already"
    assert pp == "the mesh has an axis 'pp' already"


# Dropout.


class Undropped(RandomTask):
    """Ranks along `own` compute the same activations."""

    own: Axis = Axis("own", 2, 60, "nothing", distinct_dropout=False)

    @hookimpl
    def femto_mesh_axes(self) -> list[Axis]:
        return [self.own, PP]


def first_draw() -> tuple[int, int, int, float]:
    trainer = make_trainer({}, (), {"task": Undropped()})
    mesh = trainer.mesh
    answer = mesh.coordinate("own"), mesh.coordinate("pp"), mesh.coordinate("dp"), float(torch.rand(()))
    trainer.close()
    return answer


def test_ranks_draw_alike_along_axes_without_distinct_dropout_and_differently_along_all_others(
    large_pool: WorkerPool,
) -> None:
    answers = large_pool.run(8, first_draw)
    draws: dict[tuple[int, int], set[float]] = {}
    for _, pp, dp, drawn in answers:
        draws.setdefault((pp, dp), set()).add(drawn)
    assert len(draws) == 4
    assert all(len(drawn) == 1 for drawn in draws.values()), "alike along the axis"
    assert len(set().union(*draws.values())) == 4, "different everywhere else"


# The world.


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
        ([TP, Axis("tp", 1, 3, "nothing")], ("different names", "tp")),
        ([Axis("dp", 2, 3, "rows")], ("none may be called dp",)),
        ([Axis("tp", 3, 100, "nothing")], ("4 processes", "tp 3", "multiple of 3")),
        ([Axis("tp", 8, 100, "nothing")], ("4 processes", "tp 8")),
        ([TP, Axis("pp", 4, 10, "nothing")], ("tp 2 x pp 4", "multiple of 8")),
        ([Axis("tp", 0, 100, "nothing")], ("tp 0",)),
        ([Axis("tp", -2, 100, "nothing"), Axis("pp", -2, 10, "nothing")], ("tp -2",)),
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
    assert (launch.local_rank(), launch.local_world_size()) == (3, 5)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (launch.local_rank(), launch.local_world_size()) == (0, 1)
