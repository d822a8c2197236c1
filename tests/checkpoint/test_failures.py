"""Full disks, ranks that die or do not answer, signals, locks: one sentence each, and no checkpoint lost."""

from __future__ import annotations

import errno
import functools
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from femto_checkpoint import store as stores
from femto_checkpoint import writer as writers
from femto_core import run_folder
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_report.progress import ProgressReport
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from tests.checkpoint.runs import Values, attempt, checkpoint_of, refusal, train_until, values
from tests.cli.commands import TINY_FLAGS, femto, install_plugin

Break = Callable[[int], Callable[[], None]]


def break_and_save(settings: Values, harm: Break, seconds: float = 30.0) -> tuple[str, int]:
    """Save step 1, call `harm`, which returns its undo, and save step 2; return the error and the checkpoints left."""
    trainer = make_trainer(settings)
    trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    undo = harm(trainer.mesh.rank)
    said, start = "saved", time.monotonic()
    try:
        trainer.train_step()
        trainer.save()
        trainer.checkpointer.wait()
    except UserError as error:
        said = str(error)
    except BaseException as error:  # noqa: BLE001 - a defect is part of what is tested
        said = repr(error)
    finally:
        undo()
        trainer.close()
    assert time.monotonic() - start < seconds
    trainer.mesh.barrier()
    return said, len(list((trainer.run_dir / "checkpoints").glob(".*")))


def the_same_for_all(answers: list[tuple[str, int]]) -> str:
    """The error sentence, equal on all ranks; no partial folder may be left."""
    assert len(set(answers)) == 1, answers
    said, left = answers[0]
    assert "\n" not in said
    assert left == 0, "nothing half written stays on a disk that may be full"
    return said


def limit_file_size(rank: int) -> Callable[[], None]:
    """Limit the size of rank 1's files to a few bytes, so that the kernel refuses writes."""
    if not rank:
        return lambda: None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_to_sync(rank: int) -> Callable[[], None]:
    right = os.fsync

    def broken(descriptor: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        right(descriptor)

    if rank:
        system: Any = os
        system.fsync = broken
    return lambda: setattr(os, "fsync", right)


def harm_writer(rank: int, harmed: int, harm: Callable[[Any], None]) -> Callable[[], None]:
    cls: Any = writers.Writer
    right = cls._write_share

    def broken(self: Any) -> None:
        if rank == harmed:
            harm(self)
        right(self)

    cls._write_share = broken
    return lambda: setattr(cls, "_write_share", right)


def never_answer(rank: int) -> Callable[[], None]:
    return harm_writer(rank, 1, lambda _: time.sleep(3.0))


def raise_in(rank: int, harmed: int, error: BaseException) -> Callable[[], None]:
    def fail(_: Any) -> None:
        raise error

    return harm_writer(rank, harmed, fail)


def defect_on_1(rank: int) -> Callable[[], None]:
    return raise_in(rank, 1, ArithmeticError("a defect"))


def interrupt_on_0(rank: int) -> Callable[[], None]:
    return raise_in(rank, 0, KeyboardInterrupt("gone"))


def lose_sight_of_the_folder(rank: int) -> Callable[[], None]:
    def elsewhere(writer: Any) -> None:
        writer.partial = Path("/nonexistent") / writer.partial.name

    return harm_writer(rank, 1, elsewhere)


def fail_to_rotate(rank: int) -> Callable[[], None]:
    module: Any = writers
    right = module.rotate

    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    module.rotate = fail
    return lambda: setattr(module, "rotate", right)


def save_says(folder: Path, reason: str) -> str:
    return (
        f"checkpoint of step 2 could not be written to {folder / 'test' / 'checkpoints'}: {reason}; "
        "the newest complete one is step-1"
    )


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (limit_file_size, "rank 1: [Errno 27] File too large"),
        (fail_to_sync, "rank 1: [Errno 5] Input/output error"),
        (
            lose_sight_of_the_folder,
            "rank 1: the folder that rank 0 made is not visible here; run.dir must be one folder for all machines",
        ),
    ],
    ids=["file too large", "disk error", "another machine's disk"],
)
@pytest.mark.parametrize("wait", [False, True], ids=["beside training", "waiting"])
def test_a_rank_that_cannot_write_ends_the_run_on_all_with_one_sentence(
    pool: WorkerPool, tmp_path: Path, harm: Break, reason: str, wait: bool
) -> None:
    settings = values(tmp_path, checkpoint={"wait": wait})
    assert the_same_for_all(pool.run(2, break_and_save, settings, harm)) == save_says(tmp_path, reason)
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 1"] * 2


def test_a_share_that_never_arrives_is_given_up_after_the_timeout(pool: WorkerPool, tmp_path: Path) -> None:
    settings = values(tmp_path, checkpoint={"timeout": 0.5})
    [zero, one] = pool.run(2, break_and_save, settings, never_answer)
    assert zero[0] == one[0] == save_says(tmp_path, "rank 1 has not written its share within 0.5 s")
    time.sleep(3.0)  # the late write ends, without effect
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 1"] * 2


@pytest.mark.parametrize(
    ("harm", "rank", "error", "reason"),
    [
        (defect_on_1, 1, "ArithmeticError('a defect')", "rank 1: a defect"),
        (interrupt_on_0, 0, "KeyboardInterrupt('gone')", "gone"),
    ],
    ids=["an exception", "a base exception"],
)
def test_a_defect_in_the_writing_thread_is_raised_where_it_is_and_said_elsewhere(
    pool: WorkerPool, tmp_path: Path, harm: Break, rank: int, error: str, reason: str
) -> None:
    answers = pool.run(2, break_and_save, values(tmp_path), harm)
    assert answers[rank][0] == error
    assert answers[1 - rank][0] == save_says(tmp_path, reason)
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 1"] * 2


def test_older_checkpoints_that_stay_are_said_not_the_new_one(pool: WorkerPool, tmp_path: Path) -> None:
    said = the_same_for_all(pool.run(2, break_and_save, values(tmp_path), fail_to_rotate))
    assert said == "checkpoint of step 2 is complete, but older ones could not be removed: [Errno 13] Permission denied"
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 2"] * 2


def fail_then_train(settings: Values) -> tuple[int, str]:
    trainer = make_trainer(settings)
    undo = fail_to_sync(trainer.mesh.rank)
    try:
        trainer.train()
    except UserError as error:
        return trainer.step, str(error)
    finally:
        undo()
        trainer.close()
    return trainer.step, "trained"


def test_a_save_that_fails_beside_training_ends_the_run_long_before_the_next_one(
    pool: WorkerPool, tmp_path: Path
) -> None:
    settings = values(tmp_path, checkpoint={"every": 40}, train={"steps": 100})
    [(step, said), other] = pool.run(2, fail_then_train, settings)
    assert (step, said) == other, "all ranks after the same step"
    assert 40 <= step < 80
    assert said.startswith("checkpoint of step 40 could not be written to ")
    assert said.endswith("rank 1: [Errno 5] Input/output error; the newest complete one is none")


def give_up(settings: Values) -> bool:
    trainer = make_trainer(settings)
    right, stores.LAST_CHANCE_S = stores.LAST_CHANCE_S, 0.1
    undo = never_answer(trainer.mesh.rank)
    try:
        trainer.save()
        trainer.checkpointer.close()
        time.sleep(0.2)
        return any(thread.name == "checkpoint-0" for thread in threading.enumerate())
    finally:
        stores.LAST_CHANCE_S = right
        undo()
        trainer.close()


def test_a_run_that_ended_waits_for_no_other_ranks_share(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, give_up, values(tmp_path))[0] is False, "or the process could not end for half an hour"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that holds one checkpoint of the tests' model, not two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=220k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def no_harm(rank: int) -> Callable[[], None]:
    return lambda: None


def test_a_full_disk_is_said_and_the_older_checkpoint_stays(pool: WorkerPool, small_disk: Path) -> None:
    said = the_same_for_all(pool.run(2, break_and_save, values(small_disk), no_harm))
    assert "[Errno 28] No space left on device" in said
    assert said.endswith("the newest complete one is step-1")
    assert pool.run(2, attempt, values(small_disk, "auto")) == ["resumed at 1"] * 2


def make_read_only(rank: int, folder: Path) -> Callable[[], None]:
    """Mount `folder` onto itself, read-only; file modes would not stop root."""
    if rank == 0:
        mount(["--bind", folder, folder])
        mount(["-o", "remount,ro,bind", folder])
    torch.distributed.barrier()
    return lambda: None if rank else mount([folder], "umount")


def mount(words: list[Any], command: str = "mount") -> None:
    subprocess.run([command, *map(str, words)], capture_output=True, check=True)


def test_a_folder_that_turns_read_only_is_said_and_the_older_checkpoint_stays(
    pool: WorkerPool, small_disk: Path
) -> None:
    folder = small_disk / "test" / "checkpoints"
    answers = pool.run(2, break_and_save, values(small_disk), functools.partial(make_read_only, folder=folder))
    said = the_same_for_all(answers)
    assert said.startswith(f"checkpoints cannot be written to {folder}: ")
    assert "[Errno 30] Read-only file system" in said
    assert pool.run(2, attempt, values(small_disk, "auto")) == ["resumed at 1"] * 2


def save_into(settings: Values) -> str:
    trainer = make_trainer(settings)
    try:
        trainer.train_step()
        trainer.save()
        trainer.checkpointer.wait()
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return "saved"


def test_a_file_in_the_folders_place_is_said(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "checkpoints").write_text("in the way")
    answers = pool.run(2, save_into, values(tmp_path))
    assert len(set(answers)) == 1
    assert answers[0].startswith(f"checkpoints cannot be written to {tmp_path / 'test' / 'checkpoints'}: ")
    assert "File exists" in answers[0]


def test_a_folder_that_is_no_checkpoint_is_neither_loaded_nor_overwritten(pool: WorkerPool, tmp_path: Path) -> None:
    notes = checkpoint_of(tmp_path, 1) / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    answers = pool.run(2, save_into, values(tmp_path, "auto"))
    assert set(answers) == {
        f"checkpoint of step 1 cannot be written: {notes.parent} exists and is not a checkpoint; move it away"
    }
    assert notes.read_text() == "mine"


# Two runs, one folder.


def hold(folder: Path, seconds: float) -> str:
    """Rank 0 holds the lock of a run's folder; then another trainer opens the same folder."""
    first = make_trainer(values(folder))
    right, run_folder.LOCK_S = run_folder.LOCK_S, seconds
    try:
        answer = attempt(values(folder, "auto"))
    finally:
        run_folder.LOCK_S = right
    first.close()
    assert attempt(values(folder, "auto")) == "resumed at 0", "the lock goes with the run"
    return answer


def test_a_second_run_in_one_folder_is_refused_by_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    answers = pool.run(2, hold, tmp_path, 0.2)
    assert answers[0] == answers[1]
    assert answers[0].startswith(f"{tmp_path / 'test'} is in use: process ")
    assert answers[0].endswith(" is training there now; wait for it, or choose another --run.name")


# Signals.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_asked_of_one_rank_stops_all_after_the_step_with_a_checkpoint(
    pool: WorkerPool, tmp_path: Path, rank: int
) -> None:
    assert pool.run(2, stop_at_three, values(tmp_path, checkpoint={"every": 100}), rank) == [3, 3]
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 3"] * 2


class Stopper(RandomTask):
    """Asks the trainer to stop in the middle of a step, as the signal handler does."""

    trainer: Any = None

    @hookimpl
    def femto_train_begin(self, trainer: Any) -> None:
        type(self).trainer = trainer

    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        if step == 3:
            self.trainer.request_stop()


def stop_at_three(settings: Values, rank: int, *observers: object) -> int:
    asked = torch.distributed.get_rank() == rank
    objects = {str(number): observer for number, observer in enumerate(observers)}
    trainer = make_trainer(settings, (), {"random_task": Stopper() if asked else RandomTask(), **objects})
    trainer.train()
    trainer.close()
    return trainer.step


def test_a_run_that_saves_nothing_says_so_when_it_is_stopped(
    world_of_one: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop_at_three(values(tmp_path), 0, ProgressReport()) == 3
    said = "interrupted after step 3; nothing is saved, because checkpoint.every = 0\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "test" / "checkpoints").exists()


SIGNALLED = """
import os, signal
from femto_core.hookspecs import hookimpl
from femto_tools.testing import RandomTask

task = RandomTask()

@hookimpl
def femto_dataset(config, split):
    return task.femto_dataset(config, split)

@hookimpl
def femto_collator():
    return task.femto_collator()

@hookimpl
def femto_step_begin(step):
    if step == 2 and os.environ.get("RANK", "0") == os.environ["SIGNALLED"]:
        os.kill(os.getpid(), signal.SIGNAL)
"""


def end_by_signal(folder: Path, name: str, processes: int, rank: str) -> list[str]:
    """Return the checkpoints of a run that got the signal in its second step."""
    environment = install_plugin(folder / "site", "signalled", SIGNALLED.replace("SIGNAL)", f"{name})"))
    flags = [*TINY_FLAGS, "--run.name", "r", "--plugins", "signalled", "--model.vocab-size", "32"]
    flags += ["--checkpoint.every", "100", "--train.steps", "100"]
    done = femto(flags, folder, {**environment, "SIGNALLED": rank}, processes)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return sorted(path.name for path in (folder / "runs" / "r" / "checkpoints").iterdir())


def test_a_signal_saves_and_leaves_with_0(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(end_by_signal, tmp_path / name, name, processes, rank)
            for name, processes, rank in (("SIGTERM", 0, "0"), ("SIGUSR1", 2, "1"))
        ]
        assert [job.result() for job in jobs] == [["latest", "step-2"]] * 2


# A dead rank.


def die_while_writing(settings: Values) -> None:
    trainer = make_trainer(settings)
    trainer.train_step()
    harm_writer(trainer.mesh.rank, 1, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    trainer.save()
    trainer.checkpointer.wait()


def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, train_until, values(tmp_path), 2)
    own = WorkerPool(2)
    with pytest.raises(AssertionError, match="the worker died"):
        own.run(2, die_while_writing, values(tmp_path, "auto"), timeout_s=60)
    own.close()
    assert list((tmp_path / "test" / "checkpoints").glob(".partial-step-3-*"))
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 2"] * 2
    pool.run(2, train_until, values(tmp_path, "auto"), 3)
    assert not list((tmp_path / "test" / "checkpoints").glob(".*"))
    assert "resumed" not in refusal(pool, values(tmp_path, "none"))


def test_a_run_that_ends_on_an_error_lets_the_save_under_way_finish(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, fail_after_save, values(tmp_path, checkpoint={"every": 2})) == ["broken at 3"] * 2
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 2"] * 2


class Broken(RandomTask):
    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        if step == 3:
            raise ArithmeticError(f"broken at {step}")


def fail_after_save(settings: Values) -> str:
    trainer = make_trainer(settings, (), {"random_task": Broken()})
    undo = harm_writer(0, 0, lambda _: time.sleep(0.5))
    try:
        trainer.train()
    except ArithmeticError as error:
        return str(error)
    finally:
        undo()
        trainer.close()
    return "trained"
