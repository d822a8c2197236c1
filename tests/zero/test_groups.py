"""Updates in groups: as many, of the same parameters, on all ranks, so that an optimizer may communicate in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from femto_core.hookspecs import hookimpl
from femto_core.mesh import Mesh
from femto_core.optim import make_adamw
from femto_core.precision import ParamShare
from femto_tools.testing import RandomTask, WorkerPool, assemble, make_trainer, record_training, worst_difference
from tests.merging import Values, merged
from tests.zero.tasks import HardTask

GROUPS: Values = {"bf16": {"group_mib": 0.002}, "model": {"layers": 4, "tied": False}, "train": {"steps": 3}}
UNEVEN: Values = {"pp": {"size": 2, "layers": "1,3"}}
LAYOUTS: list[tuple[int, tuple[str, ...], Values]] = [
    (2, ("zero1", "bf16"), {"zero": {"bucket_mib": 0.006}}),
    (3, ("zero2", "bf16"), {"zero": {"bucket_mib": 0.006}, "data": {"global_batch": 6}}),
    (4, ("zero2", "bf16"), {"zero": {"bucket_mib": 0.1}}),
    (4, ("zero3", "bf16"), {}),
    (2, ("pp", "bf16"), UNEVEN),
    (4, ("pp", "zero2", "bf16"), {**UNEVEN, "zero": {"bucket_mib": 0.006}}),
    (4, ("pp", "zero3", "bf16"), UNEVEN),
]


@attrs.frozen
class Asked:
    """What one rank's optimizer and trainer were given."""

    place: int
    """Of the pipeline."""
    groups: list[list[str]]
    sizes: list[list[int]]
    offered: list[str]
    empty: int
    """How many of the shares that the optimizer was offered are empty."""


def asked(values: Values, plugins: tuple[str, ...]) -> Asked:
    offered: list[ParamShare] = []

    class Listening(RandomTask):
        @hookimpl
        def femto_optimizer(self, config: Any, shares: Sequence[ParamShare]) -> torch.optim.Optimizer:
            offered.extend(shares)
            return make_adamw(shares, config.optim)

    trainer = make_trainer(merged(GROUPS, values), plugins, {"task": Listening()})
    trainer.train_step()
    groups = [list(group) for group in trainer.update_groups]
    assert [share.name for share in offered] == [share.name for share in trainer.shares]
    assert sorted(share.name for group in groups for share in group) == sorted(share.name for share in offered)
    answer = Asked(
        place=trainer.mesh.coordinate("pp"),
        groups=[[share.name for share in group] for group in groups],
        sizes=[[share.master.numel() for share in group] for group in groups],
        offered=[share.name for share in offered],
        empty=sum(not share.master.numel() for share in offered),
    )
    trainer.close()
    return answer


@pytest.mark.parametrize(("ranks", "plugins", "values"), LAYOUTS)
def test_all_ranks_have_equally_many_groups_and_those_of_one_stage_the_same(
    pool: WorkerPool, ranks: int, plugins: tuple[str, ...], values: Values
) -> None:
    answers = pool.run(ranks, asked, values, plugins)
    assert len({len(answer.groups) for answer in answers}) == 1
    assert len(answers[0].groups) > 4, "one group would show nothing"
    for place in {answer.place for answer in answers}:
        first, *others = [answer for answer in answers if answer.place == place]
        assert all(other.groups == first.groups for other in others)
        assert all(other.offered == first.offered for other in others), "empty shares are offered too"
        if others:
            assert any(other.sizes != first.sizes for other in others), "shares that are equal would show nothing"
    if "pp" in plugins:
        counts = {answer.place: sum(map(bool, answer.groups)) for answer in answers}
        assert counts[0] < counts[1], "the shorter stage has groups with nothing in them"
    if ranks > 2 and "pp" not in plugins:
        assert sum(answer.empty for answer in answers) > 0


@attrs.frozen
class TalkingTask(HardTask):
    """Its optimizer sums a number over the ranks of an axis, and over the world, in every `step()`."""

    heard: list[tuple[float, float]] = attrs.field(factory=list, eq=False)

    @hookimpl
    def femto_optimizer(self, config: Any, mesh: Mesh, shares: Sequence[ParamShare]) -> torch.optim.Optimizer:
        optimizer, heard = make_adamw(shares, config.optim), self.heard

        def talk(*_: Any) -> None:
            mine = float(sum(s.master.grad.numel() for s in shares if s.master.grad is not None))
            heard.append((float(mesh.sum(torch.tensor(mine), "dp")), float(mesh.sum_world(torch.tensor(1.0)))))

        optimizer.register_step_pre_hook(talk)
        return optimizer


def talking(values: Values, plugins: tuple[str, ...]) -> tuple[dict[str, Any], list[tuple[float, float]], int]:
    task = TalkingTask(frozen=("layers.0.",))
    trainer = make_trainer(merged(GROUPS, values), plugins, {"task": task})
    count = len(trainer.update_groups)
    return record_training(trainer), task.heard, count


@pytest.fixture(scope="module")
def one(pool: WorkerPool) -> dict[str, Any]:
    answers: list[tuple[dict[str, Any], Any, Any]] = pool.run(1, talking, {}, ("bf16",))
    return answers[0][0]


@pytest.mark.parametrize(("ranks", "plugins", "values"), [layout for layout in LAYOUTS if layout[0] != 3])
def test_an_optimizer_that_communicates_in_every_step_call_trains_as_on_one_process(
    pool: WorkerPool, one: dict[str, Any], ranks: int, plugins: tuple[str, ...], values: Values
) -> None:
    """Frozen layers make the first of the uneven stages shorter still, so that some ranks step without a gradient."""
    answers = pool.run(ranks, talking, values, plugins, timeout_s=60)
    assert worst_difference(assemble([one]), assemble([part for part, _, _ in answers])) < 1e-9
    for _, heard, count in answers:
        assert len(heard) == 3 * count
        assert {world for _, world in heard} == {ranks}


def all_frozen_but_the_head(plugins: tuple[str, ...]) -> tuple[int, int, float]:
    task = HardTask(trainable=("lm_head", "model.norm"))
    trainer = make_trainer(merged(GROUPS, UNEVEN), plugins, {"task": task})
    info = trainer.train_step()
    trained = sum(share.trainable for share in trainer.shares)
    count = len(trainer.update_groups)
    dist.barrier()
    trainer.close()
    return trained, count, info.grad_norm


def test_a_stage_without_anything_to_train_steps_as_often_as_the_others(pool: WorkerPool) -> None:
    first, last = pool.run(2, all_frozen_but_the_head, ("pp", "bf16"))
    assert (first[0], last[0]) == (0, 2)
    assert first[1] == last[1]
    assert first[2] == last[2] > 0
