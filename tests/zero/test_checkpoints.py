"""A checkpoint of any stage on any number of ranks loads under any other, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from femto_core.layout import ParamLayout
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.checkpoint.runs import checkpoint_of
from tests.conftest import read_flat
from tests.merging import Values, merged
from tests.zero.tasks import STAGES, HardTask

FP32: Values = {"train": {"dtype": "float32", "steps": 7}, "data": {"micro_batch": 1}}
WRITERS = [("stage 0", 2), ("stage 1", 2), ("stage 2", 4), ("stage 3", 1), ("stage 3", 4)]
TASK = HardTask(adapters=(0,), frozen=("layers.1.mlp.up_proj", "embed_tokens"))
"""Frozen matrices, a scalar, a tensor without elements, one of one element."""
Global = dict[str, torch.Tensor]
Written = dict[str, list[tuple[Path, Global]]]


def settings(folder: Path, stage: str, resume: str = "none", **more: Any) -> tuple[tuple[str, ...], Values]:
    plugins, own = STAGES[stage]
    place: Values = {"run": {"dir": str(folder)}, "checkpoint": {"resume": resume, **more.pop("checkpoint", {})}}
    return plugins, merged(own, FP32, {"model": {"tied": False}}, place, more)


def state_of(trainer: Any) -> dict[str, tuple[ParamLayout, dict[str, torch.Tensor]]]:
    found = {}
    for group in trainer.shares:
        entries = {"master": group.master.detach(), "compute": group.compute.detach()}
        entries |= {key: torch.as_tensor(value) for key, value in trainer.optimizer.state.get(group.master, {}).items()}
        found[group.name] = group.layout, {key: value.clone() for key, value in entries.items()}
    return found


def write(folder: Path, stage: str, extra: tuple[str, ...]) -> Any:
    plugins, values = settings(folder, stage)
    trainer = make_trainer(values, (*plugins, *extra), {"random_task": TASK})
    trainer.train_step(), trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    found = state_of(trainer)
    trainer.close()
    return found


def put_together(ranks: list[Any]) -> Global:
    whole: Global = {}
    for rank in ranks:
        for layout, entries in rank.values():
            for key, value in entries.items():
                name = f"{key} of {layout.name}"
                if key == "step":
                    whole[name] = value
                    continue
                target = whole.setdefault(name, torch.full(layout.global_shape, torch.nan, dtype=value.dtype))
                flat, start = value.flatten(), 0
                for box in layout.owned():
                    target[box.slices()] = flat[start : start + box.numel].view(box.sizes)
                    start += box.numel
    return whole


def read_all(folders: list[tuple[Path, Global]], stage: str, extra: tuple[str, ...], here: Path) -> list[str]:
    """Load each checkpoint; return what differs."""
    wrong = []
    for folder, whole in folders:
        plugins, values = settings(here, stage, str(checkpoint_of(folder, 2)))
        trainer = make_trainer(values, (*plugins, *extra), {"random_task": TASK})
        assert trainer.step == 2
        names = set()
        for name, (layout, entries) in state_of(trainer).items():
            for key, value in entries.items():
                names.add(f"{key} of {layout.name}")
                wanted = whole[f"{key} of {layout.name}"]
                mine = wanted if key == "step" else read_flat(wanted, layout)
                found = value if key == "step" else value.flatten()[: mine.numel()]
                if found.dtype != mine.dtype or not torch.equal(found, mine):
                    wrong.append(f"{folder.name}: {key} of {name}")
                if key in ("exp_avg", "exp_avg_sq") and value.dtype != torch.float32:
                    wrong.append(f"{folder.name}: {key} of {name} is {value.dtype}")
        if trainer.mesh.world_size == 1 and names != set(whole):
            wrong.append(f"{folder.name}: {sorted(names ^ set(whole))[:3]}")
        trainer.close()
    return wrong


@pytest.fixture(scope="module")
def written(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint by each of the writers, in fp32 and in bf16."""
    found: Written = {}
    for extra in ("", "bf16"):
        for stage, dp in WRITERS:
            folder = tmp_path_factory.mktemp(f"{stage} on {dp} ranks".replace(" ", "-"))
            whole = put_together(pool.run(dp, write, folder, stage, (extra,) if extra else ()))
            assert not any(bool(value.isnan().any()) for value in whole.values())
            found.setdefault(extra, []).append((folder, whole))
    return found


READERS = [("", stage, dp) for stage in STAGES for dp in (1, 2, 4)]
READERS += [("bf16", "stage 0", 1), ("bf16", "stage 1", 4), ("bf16", "stage 2", 2), ("bf16", "stage 3", 4)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("extra", "stage", "dp"), READERS)
def test_any_stage_on_any_number_of_ranks_loads_what_any_other_wrote(
    pool: WorkerPool, tmp_path: Path, written: Written, extra: str, stage: str, dp: int
) -> None:
    plugins = (extra,) if extra else ()
    assert pool.run(dp, read_all, written[extra], stage, plugins, tmp_path) == [[]] * dp


def start_weights() -> Global:
    plugins, values = settings(Path("/nowhere"), "stage 0")
    trainer = make_trainer({**values, "run": {}}, plugins, {"random_task": TASK})
    found = {group.name: group.master.detach().clone() for group in trainer.shares}
    trainer.close()
    return found


def test_frozen_parameters_are_saved_and_did_not_move(pool: WorkerPool, written: Written) -> None:
    [start] = pool.run(1, start_weights)
    for extra, folders in written.items():
        for _, whole in folders:
            for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
                wanted = start[name].to(torch.bfloat16) if extra else start[name]
                assert torch.equal(whole[f"master of {name}"], wanted)
                assert f"exp_avg of {name}" not in whole
            assert whole["master of model.layers.0.mlp.down_proj.empty"].shape == (0, 4)


# Going on.


def go_on(folder: Path, stage: str, first: int, last: int) -> list[tuple[float, float]]:
    plugins, own = STAGES[stage]
    values = merged(own, {"run": {"dir": str(folder)}, "checkpoint": {"resume": "auto"}, "train": {"steps": 7}})
    trainer = make_trainer(values, (*plugins, "bf16"), {"random_task": TASK})
    assert trainer.step == first
    infos = [trainer.train_step() for _ in range(last - first)]
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    return [(info.loss, info.grad_norm) for info in infos]


def test_a_run_that_changes_stage_and_size_again_and_again_is_the_uninterrupted_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    [straight] = pool.run(1, go_on, tmp_path / "straight", "stage 0", 0, 7)
    seen = []
    path = [("stage 3", 4), ("stage 1", 2), ("stage 0", 1), ("stage 2", 4), ("stage 3", 2), ("stage 3", 1)]
    for number, (stage, dp) in enumerate([*path, ("stage 1", 4)]):
        [found, *_] = pool.run(dp, go_on, tmp_path / "changing", stage, number, number + 1)
        seen += found
    for (loss, norm), (other_loss, other_norm) in zip(straight, seen, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-9)
        assert norm == pytest.approx(other_norm, rel=1e-9)


def in_bf16(folder: Path, stage: str, first: int, last: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    plugins, own = STAGES[stage]
    place: Values = {"run": {"dir": str(folder)}, "checkpoint": {"resume": "auto"}}
    values = merged(own, place, {"train": {"steps": 4, "dtype": "float32"}, "data": {"micro_batch": 1}})
    trainer = make_trainer(values, (*plugins, "bf16"), {"random_task": RandomTask()})
    assert trainer.step == first
    losses = [trainer.train_step().loss for _ in range(last - first)]
    trainer.save()
    trainer.checkpointer.wait()
    weights = {group.name: group.master.detach().clone() for group in trainer.shares}
    trainer.close()
    return losses, weights


@pytest.mark.parametrize("stage", STAGES)
def test_in_bf16_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, stage: str
) -> None:
    """With a tied weight: the two gradients of it must add up in one dtype, in a trainer's first step as in others."""
    straight = pool.run(2, in_bf16, tmp_path / "straight", stage, 0, 4)
    halves = [pool.run(2, in_bf16, tmp_path / "halves", stage, *part) for part in ((0, 2), (2, 4))]
    for rank, (losses, weights) in enumerate(straight):
        assert losses == [loss for half in halves for loss in half[rank][0]]
        assert all(torch.equal(weight, halves[1][rank][1][name]) for name, weight in weights.items())


def take_weights(folder: Path, path: str, stage: str, whole: Global) -> dict[str, float]:
    plugins, values = settings(
        folder, stage, path, checkpoint={"weights_only": True}, train={"seed": 5}, optim={"lr": 1e-4}
    )
    trainer = make_trainer(values, (*plugins, "bf16"), {"random_task": TASK})
    assert (trainer.step, len(trainer.optimizer.state)) == (0, 0)
    before = {}
    for name, (layout, entries) in state_of(trainer).items():
        wanted = read_flat(whole[f"master of {layout.name}"], layout)
        assert torch.equal(entries["master"].flatten(), wanted), name
        assert torch.equal(entries["compute"].flatten(), wanted.to(entries["compute"].dtype)), name
        before[name] = entries["master"]
    trainer.train_step()
    moved = {g.name: float((g.master - before[g.name]).abs().max()) for g in trainer.shares if g.master.numel()}
    apart = [
        g.name
        for g in trainer.shares
        if g.master is not g.compute and not torch.equal(g.master.to(g.compute.dtype), g.compute)
    ]
    assert not apart
    assert all(
        entry[key].dtype == torch.float32
        for entry in trainer.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    )
    trainer.close()
    return moved


@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone_refresh_the_masters_so_that_the_next_step_does_not_revert_them(
    pool: WorkerPool, tmp_path: Path, stage: str
) -> None:
    whole = put_together(pool.run(2, write, tmp_path / "old", "stage 2", ("bf16",)))
    path = str(checkpoint_of(tmp_path / "old", 2))
    for moved in pool.run(2, take_weights, tmp_path / "new", path, stage, whole):
        assert 0 < max(moved.values()) < 1e-3, "one step at a rate of 1e-4"
