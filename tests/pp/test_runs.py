"""Everything around a pipeline's training steps: evaluation, samples, loss on rank 0, checkpoints, export."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from femto_checkpoint.export import export
from femto_checkpoint.options import ExportConfig
from femto_core.hookspecs import hookimpl
from femto_core.model import FullModel
from femto_core.trainer import Trainer
from femto_report.samples import continue_tokens
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.pp.tasks import NAMES, ZERO, UnequalTask, Values, merged, pipeline

SIX: Values = {
    "train": {"steps": 6},
    "model": {"layers": 4},
    "data": {"micro_batch": 1},
    "eval": {"rows": 7},
}
LAYOUTS: dict[str, tuple[int, tuple[str, ...], Values]] = {
    "one": (1, (), {}),
    "dp2": (2, (), {}),
    "dp2 zero3": (2, ("zero3",), {}),
    **{f"pp2 {name}": (2, ("pp",), pipeline(name)) for name in NAMES},
    "pp4": (4, ("pp",), pipeline("zb", 4)),
    "pp2 dp2 zero1": (4, ("pp", "zero1"), merged(pipeline("1f1b"), ZERO["zero1"])),
    "pp2 dp2 zero3": (4, ("pp", "zero3"), pipeline("interleaved")),
    "pp2 tp2": (4, ("pp", "tp"), merged(pipeline("1f1b"), {"tp": {"size": 2}})),
    "pp2 by hand": (2, ("pp",), pipeline("gpipe", layers="3,1")),
}


@attrs.frozen
class Seen:
    """The figures of a run on one rank."""

    numbers: list[tuple[float, float, float, int]]
    """(loss, gradient norm, learning rate, tokens) of each step."""
    held_out: list[float]
    rows: list[list[int]]
    """The first row of the first micro-batch of each step."""
    sample: list[int]
    counters: tuple[int, int, int]


def go(layout: str, values: Values, first: int, last: int, save: bool, task: RandomTask) -> Seen:
    """Train from step `first`, which the resumed run must have reached, to `last`, as a worker's job."""
    _, plugins, own = LAYOUTS[layout]
    trainer = make_trainer(merged(SIX, own, values), plugins, {"random_task": task})
    assert trainer.step == first
    numbers, held_out, rows = [], [], []
    next_step = trainer.loader.next_step

    def noted() -> Any:
        found = next_step()
        rows.append(found[0].input_ids[0].tolist())
        return found

    trainer.loader.next_step = noted  # type: ignore[method-assign]
    while trainer.step < last:
        info = trainer.train_step()
        numbers.append((info.loss, info.grad_norm, info.lr, info.tokens))
        held_out.append(trainer.evaluate())
    sample = continue_tokens(trainer, [3, 1, 4], count=5, temperature=0.7, seed=1, end_id=None)
    if save:
        trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    return Seen(numbers, held_out, rows, sample, (trainer.step, trainer.skipped, trainer.tokens_seen))


def run(
    pool: WorkerPool,
    layout: str,
    folder: Path,
    first: int,
    last: int,
    *,
    save: bool = False,
    task: RandomTask | None = None,
    **more: Mapping[str, Any],
) -> Seen:
    """Run on all ranks of a layout, check that they agree, and return rank 0's figures."""
    resume = {"checkpoint": {"resume": "auto" if first else "none"}}
    values = merged({"run": {"dir": str(folder)}}, resume, more)
    found = pool.run(LAYOUTS[layout][0], go, layout, values, first, last, save, task or RandomTask())
    for other in found[1:]:
        assert attrs.evolve(other, rows=found[0].rows) == found[0]
    seen: Seen = found[0]
    return seen


def assert_same(seen: Seen, wanted: Seen, first: int, last: int) -> None:
    for mine, theirs in zip(seen.numbers, wanted.numbers[first:last], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    assert seen.held_out == pytest.approx(wanted.held_out[first:last], rel=1e-9)
    assert seen.rows == wanted.rows[first:last]


@pytest.fixture(scope="module")
def straight(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The figures of an uninterrupted run on one process."""
    return run(pool, "one", tmp_path_factory.mktemp("straight"), 0, 6)


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, straight: Seen) -> dict[str, Path]:
    """Layout -> the folder of its run, with a checkpoint of step 3."""
    folders: dict[str, Path] = {}
    for layout in ("one", *(f"pp2 {name}" for name in NAMES), "pp2 dp2 zero1", "pp2 dp2 zero3", "pp2 tp2"):
        folders[layout] = tmp_path_factory.mktemp(layout.replace(" ", "-"))
        assert_same(run(pool, layout, folders[layout], 0, 3, save=True), straight, 0, 3)
    return folders


RESUMED = [
    ("pp2 gpipe", "one"),
    ("pp2 1f1b", "pp4"),
    ("pp2 interleaved", "dp2"),
    ("pp2 zb", "dp2 zero3"),
    ("pp2 interleaved", "pp2 zb"),
    ("pp2 zb", "pp2 interleaved"),
    ("pp2 dp2 zero1", "pp2 by hand"),
    ("pp2 dp2 zero3", "one"),
    ("pp2 dp2 zero3", "pp2 tp2"),
    ("pp2 tp2", "pp2 dp2 zero3"),
    ("one", "pp2 dp2 zero1"),
    ("one", "pp2 interleaved"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("before", "after"), RESUMED, ids=lambda name: name.replace(" ", ""))
def test_any_pipeline_resumes_from_a_checkpoint_of_any_other(
    pool: WorkerPool, tmp_path: Path, saved: dict[str, Path], straight: Seen, before: str, after: str
) -> None:
    """Rows, figures and samples are those of the uninterrupted run."""
    shutil.copytree(saved[before], tmp_path, dirs_exist_ok=True)
    seen = run(pool, after, tmp_path, 3, 6)
    assert_same(seen, straight, 3, 6)
    assert seen.counters == straight.counters
    assert seen.sample == straight.sample


def test_checkpoints_hold_a_tied_weight_once(saved: dict[str, Path]) -> None:
    sizes = {
        layout: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for layout, folder in saved.items()
    }
    assert max(sizes.values()) < 1.25 * sizes["one"], sizes


@pytest.mark.parametrize("layout", ["pp2 interleaved", "pp2 zb", "pp2 dp2 zero1", "pp2 dp2 zero3", "pp2 tp2"])
def test_an_export_is_one_process_s(tmp_path: Path, saved: dict[str, Path], layout: str) -> None:
    found = {}
    for name in ("one", layout):
        out = tmp_path / name.replace(" ", "-")
        [file] = export(saved[name] / "test" / "checkpoints" / "step-3", ExportConfig(output=str(out)))
        found[name] = load_file(out / file)
    assert list(found[layout]) == list(found["one"])
    for key, value in found["one"].items():
        assert found[layout][key].dtype == value.dtype
        torch.testing.assert_close(found[layout][key], value, rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_held_out_loss_does_not_depend_on_pipeline_and_batch(
    pool: WorkerPool, tmp_path: Path, straight: Seen, micro_batch: int
) -> None:
    """No size divides the seven rows."""
    for layout in ("pp2 interleaved", "pp2 dp2 zero3"):
        seen = run(pool, layout, tmp_path / layout, 0, 1, data={"micro_batch": micro_batch})
        assert seen.held_out == pytest.approx(straight.held_out[:1], rel=1e-9)


def test_held_out_rows_of_unequal_length(pool: WorkerPool, tmp_path: Path) -> None:
    one = run(pool, "one", tmp_path / "one", 0, 1, task=UnequalTask())
    for layout in ("pp2 interleaved", "pp4"):
        seen = run(pool, layout, tmp_path / layout, 0, 1, task=UnequalTask())
        assert seen.held_out == pytest.approx(one.held_out, rel=1e-9)


# Dropout.


class DrawingTask(RandomTask):
    """Attention dropout of 0.3 in training."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        for module in model.module.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3


def numbers_drawn(values: Values, plugins: tuple[str, ...]) -> tuple[int, list[float]]:
    trainer: Trainer = make_trainer(values, plugins, {"random_task": DrawingTask()})
    coordinate = trainer.mesh.coordinate("pp")
    drawn = torch.rand(4).tolist()
    trainer.train_step()
    trainer.close()
    return coordinate, drawn


def test_ranks_drop_out_different_weights(pool: WorkerPool) -> None:
    """Otherwise layers at the same place on two ranks would always have the same masks."""
    drawn = pool.run(4, numbers_drawn, merged(SIX, pipeline("1f1b", 4)), ("pp",))
    assert len({tuple(numbers) for _, numbers in drawn}) == 4
    both = merged(SIX, pipeline("1f1b"), {"tp": {"size": 2}})
    for plugins in (("pp", "tp"), ("tp", "pp")):
        drawn = pool.run(4, numbers_drawn, both, plugins)
        assert len({tuple(numbers) for _, numbers in drawn}) == 4
