"""A resumed run equals the uninterrupted run: bit for bit, or within 1e-9 under another layout."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from femto_checkpoint.snapshot import equal_states
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.checkpoint.runs import ROWS, Seen, Values, checkpoint_of, run, train_until, values


@pytest.fixture(scope="module")
def whole_runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """The uninterrupted run of two ranks, for each policy at an epoch's end."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        remainder: pool.run(2, run, values(folder / remainder, data={"remainder": remainder}), 0, 7)
        for remainder in ("drop", "pad")
    }


@pytest.mark.parametrize(
    ("stop", "remainder", "wait"),
    [
        (1, "drop", False),
        (1, "pad", False),
        (3, "drop", True),
        (3, "pad", False),
        (4, "pad", False),
        (6, "drop", False),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, whole_runs: dict[str, list[Seen]], stop: int, remainder: str, wait: bool
) -> None:
    data: Values = {"data": {"remainder": remainder}}
    straight = whole_runs[remainder]
    saving = values(tmp_path, **data, checkpoint={"wait": wait})
    pool.run(2, run, saving, 0, min(7, stop + 1), stop)  # one more step after the save is lost
    resumed = pool.run(2, run, values(tmp_path, "auto", **data), stop, 7)
    for one, other in zip(straight, resumed, strict=True):
        assert other.infos == one.infos[stop:]
        assert len({info.lr for info in other.infos}) == len(other.infos), "a constant rate would prove nothing"
        assert other.held_out == one.held_out[stop:]
        assert other.counters == one.counters
        assert one.rows[-len(other.rows) :] == other.rows
        assert other.state.keys() == one.state.keys()
        assert any(name.startswith("exp_avg of") for name in one.state)
        for name, value in one.state.items():
            assert torch.equal(value, other.state[name]), name
            assert value.dtype == other.state[name].dtype
        assert torch.equal(one.random, other.random)
    assert not torch.equal(straight[0].random, straight[1].random)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_loader_processes_make_no_difference_to_a_resumed_run(
    world_of_one: None, tmp_path: Path, before: int, after: int
) -> None:
    def data(workers: int) -> Values:
        return {"data": {"workers": workers, "micro_batch": 1}}

    straight = run(values(tmp_path / "straight", **data(before)), 0, 6)
    run(values(tmp_path, **data(before)), 0, 3, 3)
    resumed = run(values(tmp_path, "auto", **data(after)), 3, 6)
    assert resumed.infos == straight.infos[3:]
    assert all(torch.equal(value, resumed.state[name]) for name, value in straight.state.items())


@pytest.fixture(scope="module")
def straight(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The uninterrupted run of one process."""
    [seen] = pool.run(1, run, values(tmp_path_factory.mktemp("straight")), 0, 7, None, False)
    assert isinstance(seen, Seen)
    return seen


def steps_of(ranks: list[Seen]) -> list[list[int]]:
    """The rows of each step in the order of one process, from the records of all ranks."""
    share = 8 // len(ranks)
    steps = len(ranks[0].rows) // share
    return [[row for r in ranks for row in r.rows[step * share : (step + 1) * share]] for step in range(steps)]


@pytest.fixture(scope="module", params=[1, 2, 4])
def cut_short(
    request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Seen]]:
    """A run of 1, 2 or 4 ranks that stopped after three steps: its folder, and the ranks' records."""
    folder: Path = tmp_path_factory.mktemp("cut-short")
    return folder, pool.run(request.param, run, values(folder), 0, 3, 3, False)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_of_ranks_goes_on_with_what_any_other_saved(
    pool: WorkerPool, tmp_path: Path, straight: Seen, cut_short: tuple[Path, list[Seen]], after: int
) -> None:
    folder, first = cut_short
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    second = pool.run(after, run, values(tmp_path, "auto"), 3, 7, None, False)
    rows = [*steps_of(first), *steps_of(second)]
    assert rows == steps_of([straight]), "the same rows at the same step, in the same order"
    for epoch in range(3):
        seen = [row for step in rows[2 * epoch : 2 * epoch + 2] for row in step]
        assert len(set(seen)) == 16 <= ROWS, "nothing twice"
    for rank in second:
        assert rank.counters == straight.counters
        for mine, wanted in zip(rank.infos, straight.infos[3:], strict=True):
            assert mine.loss == pytest.approx(wanted.loss, rel=1e-9)
            assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-9)
            assert (mine.lr, mine.tokens) == (wanted.lr, wanted.tokens)
        for name, value in straight.state.items():
            torch.testing.assert_close(rank.state[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_saving_changes_nothing_of_the_run_that_saves(
    pool: WorkerPool, tmp_path: Path, whole_runs: dict[str, list[Seen]]
) -> None:
    saving = pool.run(2, run, values(tmp_path), 0, 7, 2)
    for one, other in zip(whole_runs["drop"], saving, strict=True):
        assert one.infos == other.infos
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())


def save_and_scribble(settings: Values) -> None:
    trainer = make_trainer(settings)
    trainer.train_step()
    kept = {g.name: g.master.detach().clone() for g in trainer.shares}
    trainer.save()
    with torch.no_grad():
        for group in trainer.shares:
            group.master.fill_(7.0)  # at once, while the file is being written
            for value in trainer.optimizer.state[group.master].values():
                value.fill_(9.0)
    trainer.checkpointer.wait()
    trainer.close()
    again = make_trainer({**settings, "checkpoint": {"resume": "auto"}})
    assert all(torch.equal(g.master, kept[g.name]) for g in again.shares)
    steps = {float(again.optimizer.state[g.master]["step"]) for g in again.shares}
    assert steps == {1.0}
    again.close()


def test_a_save_beside_training_holds_the_state_at_the_call(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, save_and_scribble, values(tmp_path))


def train_to_the_end(settings: Values) -> list[str]:
    trainer = make_trainer(settings)
    trainer.train()
    trainer.close()
    folder = trainer.run_dir / "checkpoints"
    assert trainer.checkpointer.latest(folder) == folder / f"step-{trainer.step}"
    return sorted(path.name for path in folder.iterdir())


def test_the_trainer_saves_on_time_and_once_more_at_the_end(pool: WorkerPool, tmp_path: Path) -> None:
    every = {"checkpoint": {"every": 3}}
    assert (
        pool.run(2, train_to_the_end, values(tmp_path / "a", **every)) == [["latest", "step-3", "step-6", "step-7"]] * 2
    )
    early = {"checkpoint": {"every": 3}, "train": {"steps": 7, "stop_after": 4}}
    assert pool.run(2, train_to_the_end, values(tmp_path / "b", **early))[0] == ["latest", "step-3", "step-4"]


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"keep": 1}, [5]),
        ({"keep": 0}, [1, 2, 3, 4, 5]),
        ({"keep": 2, "keep_every": 2}, [2, 4, 5]),
    ],
    ids=str,
)
def test_the_newest_are_kept_and_the_milestones(
    pool: WorkerPool, tmp_path: Path, section: dict[str, int], kept: list[int]
) -> None:
    settings = values(tmp_path, train={"steps": 5}, checkpoint={"every": 1, **section})
    assert pool.run(1, train_to_the_end, settings)[0] == ["latest", *(f"step-{step}" for step in kept)]


# Resuming from an older checkpoint.


def latest_step(settings: Values) -> int:
    trainer = make_trainer(settings)
    trainer.close()
    return trainer.step


def test_after_going_back_auto_follows_the_newer_timeline(pool: WorkerPool, tmp_path: Path) -> None:
    keep = {"keep": 3}
    pool.run(1, train_until, values(tmp_path, checkpoint=keep), 4)
    older = str(checkpoint_of(tmp_path, 2))
    assert pool.run(1, train_until, values(tmp_path, older, checkpoint=keep), 3) == [["step-2", "step-3", "step-4"]]
    assert pool.run(1, latest_step, values(tmp_path, "auto")) == [3], "not 4, of the past that was left"
    [names] = pool.run(1, train_until, values(tmp_path, "auto", checkpoint=keep), 7)
    assert names == ["step-5", "step-6", "step-7"], "the stale one went with its age"


def test_a_stale_checkpoint_never_crowds_out_a_new_one(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, train_until, values(tmp_path, checkpoint={"keep": 0}), 4)
    older = str(checkpoint_of(tmp_path, 1))
    [names] = pool.run(1, train_until, values(tmp_path, older, checkpoint={"keep": 2}), 3)
    assert names == ["step-2", "step-3"], "the two committed last, whatever their numbers"


# Weights only.


def take_weights(settings: Values, path: str) -> tuple[int, int, dict[str, torch.Tensor], int, dict[str, torch.Tensor]]:
    changed = {**settings, "checkpoint": {"resume": path, "weights_only": True}}
    trainer = make_trainer(changed, (), {"random_task": RandomTask(rows=40)})
    weights = {g.name: g.compute.detach().clone() for g in trainer.shares}
    state, step, tokens = len(trainer.optimizer.state), trainer.step, trainer.tokens_seen
    trainer.train_step()
    after = {g.name: g.compute.detach().clone() for g in trainer.shares}
    trainer.close()
    return step, tokens, weights, state, after


def test_weights_only_is_a_new_run_from_old_weights_on_other_data(pool: WorkerPool, tmp_path: Path) -> None:
    [old] = pool.run(1, run, values(tmp_path), 0, 3, 3)
    changed = values(tmp_path / "new", train={"seed": 5}, data={"global_batch": 4, "micro_batch": 1})
    for step, tokens, weights, state, after in pool.run(2, take_weights, changed, str(checkpoint_of(tmp_path, 3))):
        assert (step, tokens, state) == (0, 0, 0)
        for name, value in weights.items():
            assert torch.equal(value, old.state[name]), name
        moved = max(float((after[name] - value).abs().max()) for name, value in weights.items())
        assert 0 < moved < 0.1, "the next step starts from them"


def single_precision_weights(settings: Values, path: str) -> list[torch.dtype]:
    trainer = make_trainer({**settings, "checkpoint": {"resume": path, "weights_only": True}})
    trainer.close()
    return list({g.master.dtype for g in trainer.shares})


def test_weights_only_takes_another_dtype_as_well(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, run, values(tmp_path), 0, 1, 1)
    changed = values(tmp_path / "new", train={"dtype": "float32"})
    assert pool.run(1, single_precision_weights, changed, str(checkpoint_of(tmp_path, 1))) == [[torch.float32]]


# Parts of plugins.


@attrs.define(eq=False)
class Diary:
    """A plugin's own state."""

    pages: int = 0
    average: torch.Tensor = attrs.field(factory=lambda: torch.zeros(3))
    thing: object = None

    def state_dict(self) -> dict[str, Any]:
        return {"pages": self.pages, "average": self.average, "nested": [(1, "a"), {2: None}], "thing": self.thing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pages, self.average = state["pages"], state["average"]
        assert state["nested"] == [(1, "a"), {2: None}]


@attrs.frozen
class DiaryTask(RandomTask):
    diary: Diary = attrs.field(factory=Diary)
    name: str = "diary"

    @hookimpl
    def femto_checkpoint_state(self) -> tuple[str, Diary]:
        return self.name, self.diary


def keep_a_diary(settings: Values, pages: int, *, per_rank: bool = True) -> tuple[int, float] | str:
    task = DiaryTask()
    try:
        trainer = make_trainer(settings, (), {"random_task": task})
    except UserError as error:
        return str(error)
    if pages:
        task.diary.pages = pages + trainer.mesh.rank * per_rank
        trainer.train_step()
        task.diary.average.fill_(2.5)
        trainer.save()
        task.diary.average.fill_(-1.0)  # changes after the call are not saved
        trainer.checkpointer.wait()
    trainer.close()
    return task.diary.pages, float(task.diary.average[0])


def test_a_plugins_part_is_saved_by_each_rank_as_it_was_at_the_call(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, keep_a_diary, values(tmp_path), 7)
    assert pool.run(2, keep_a_diary, values(tmp_path, "auto"), 0) == [(7, 2.5), (8, 2.5)]


def test_a_part_that_all_ranks_share_is_loaded_under_any_layout(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, partial(keep_a_diary, per_rank=False), values(tmp_path), 7)
    for size in (1, 4):
        assert pool.run(size, keep_a_diary, values(tmp_path, "auto"), 0) == [(7, 2.5)] * size


@pytest.mark.parametrize("size", [1, 4])
def test_a_part_that_differs_between_ranks_is_refused_under_another_layout(
    pool: WorkerPool, tmp_path: Path, size: int
) -> None:
    pool.run(2, keep_a_diary, values(tmp_path), 7)
    answers = pool.run(size, keep_a_diary, values(tmp_path, "auto"), 0)
    assert len({*answers}) == 1
    assert answers[0].startswith(
        f"{checkpoint_of(tmp_path, 1)}: the ranks saved different states of the part 'diary' (rank-00000.pt, "
        "rank-00001.pt), which fit only the layout that saved them ("
    )
    assert answers[0].endswith("resume under that layout, or to load only its weights, set --checkpoint.weights-only")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"a": [1, torch.tensor([1.0, math.nan])]}, {"a": [1, torch.tensor([1.0, math.nan])]}, True),
        (math.nan, math.nan, True),
        (torch.tensor([1.0, math.nan]), torch.tensor([math.nan, 1.0]), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        ([1], (1,), False),
        ([1, 2], [1], False),
        ({"a": 1}, {"b": 1}, False),
        (1, True, False),
    ],
    ids=str,
)
def test_states_are_equal_to_the_last_bit(a: object, b: object, same: bool) -> None:
    assert equal_states(a, b) is same


def test_a_part_that_is_not_there_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, train_until, values(tmp_path), 1)
    for answer in pool.run(2, keep_a_diary, values(tmp_path, "auto"), 0):
        assert "no part 'diary'" in answer


def diary_of(settings: Values, name: str, thing: object) -> str:
    task = DiaryTask(diary=Diary(thing=thing), name=name)
    try:
        trainer = make_trainer(settings, (), {"random_task": task})
        trainer.save()
    except (UserError, TypeError) as error:
        return str(error)
    return "saved"


def test_a_part_that_only_running_code_could_load_is_refused_when_it_is_saved(pool: WorkerPool, tmp_path: Path) -> None:
    [answer] = pool.run(1, diary_of, values(tmp_path), "diary", Path())
    assert answer.startswith("part 'diary'['thing'] is a PosixPath")


@pytest.mark.parametrize("name", ["trainer", "rng"])
def test_a_part_with_a_name_of_the_kernels_is_refused(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    [answer] = pool.run(1, diary_of, values(tmp_path), name, None)
    assert f"keep a part '{name}'" in answer


def without_the_diary(settings: Values) -> int:
    trainer = make_trainer(settings)
    trainer.close()
    return trainer.step


def test_a_part_that_nobody_keeps_any_more_is_said(
    world_of_one: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_a_diary(values(tmp_path), 3)
    assert without_the_diary(values(tmp_path, "auto")) == 1
    assert "also holds diary, which no active plugin keeps" in capsys.readouterr().err
