"""Signals, launchers, streams and other ranks: each gets a sentence, and no process stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from femto_core import run_folder
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import CheckpointSection, RunSection
from femto_core.trainer import Trainer
from femto_ops import meeting, stopping
from tests.cli.commands import TINY_FLAGS, Finished, environment, forked, install_plugin, world


def run(dataset: Path, cwd: Path, plugin: object, *flags: str, ranks: int = 1) -> list[Finished]:
    words = [*TINY_FLAGS, "--data.path", str(dataset), "--run.name", "r", *flags]
    return forked(words, cwd, world(ranks) if ranks > 1 else [{}], {"plugin": plugin})


# Signals


@attrs.frozen
class Stuck:
    """Sends signals to its own process, and never comes back from its hook."""

    numbers: tuple[int, ...]
    at_step_end: bool = False

    @hookimpl
    def femto_step_begin(self, step: int) -> None:
        if step == 2 and not self.at_step_end:
            self._stay()

    @hookimpl
    def femto_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 2 and self.at_step_end:
            self._stay()

    def _stay(self) -> None:
        stopping.PATIENCE_S = 2.0
        for number, seconds in zip(self.numbers, (0.5, 1.5), strict=False):
            threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
        time.sleep(100)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_at_once(second: signal.Signals, dataset: Path, tmp_path: Path) -> None:
    [done] = run(dataset, tmp_path, Stuck((signal.SIGINT, second)))
    assert done.code == 128 + second
    assert done.err == "femto: asked to stop a second time: this process leaves at once\n"


@pytest.mark.parametrize("at_step_end", [False, True])
def test_a_process_that_no_step_brings_to_its_end_leaves(at_step_end: bool, dataset: Path, tmp_path: Path) -> None:
    [done] = run(dataset, tmp_path, Stuck((signal.SIGTERM,), at_step_end))
    assert done.code == 1
    assert "since this process was asked to stop: it leaves" in done.err
    assert done.err.count("\n") == 1


class SlowSave:
    """A signal in the last step but one, and a save that takes longer than a stuck step may."""

    @hookimpl
    def femto_step_begin(self, trainer: Trainer, step: int) -> None:
        if step == 2:
            stopping.PATIENCE_S = 0.5
            os.kill(os.getpid(), signal.SIGTERM)
            inner = trainer.checkpointer.save

            def save(*arguments: Any, **options: Any) -> None:
                time.sleep(4)
                inner(*arguments, **options)

            trainer.checkpointer.save = save  # type: ignore[method-assign]


def test_a_save_may_take_longer_than_a_step(dataset: Path, tmp_path: Path) -> None:
    [done] = run(dataset, tmp_path, SlowSave(), "--checkpoint.every", "100")
    assert done.code == 0, done.err
    # The request comes in another thread, so that one more step may have begun.
    assert re.fullmatch(r"interrupted after step ([23]), saved in runs/r/checkpoints/step-\1\n", done.err), done.err


LOOPS = """
import os, time
from pathlib import Path
from femto_core.hookspecs import hookimpl

@hookimpl
def femto_step_end(trainer):
    time.sleep(0.05)
    Path(f"pid-{os.getpid()}").write_text("")
"""


@pytest.mark.parametrize("how", ["the terminal", "killed outright"])
def test_under_torchrun_ranks_save_and_leave(how: str, dataset: Path, tmp_path: Path) -> None:
    plugin = install_plugin(tmp_path / "site", "loops", LOOPS)
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--run.name", "r", "--plugins", "loops"]
    flags += ["--train.steps", "100000", "--checkpoint.every", "100000"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*torchrun, "femto_core", *flags],
            cwd=tmp_path,
            env=environment(plugin),
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
        try:
            wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
            if how == "the terminal":
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.kill()
            process.wait(60)
            ranks = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
            wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / "err").read_text()
    [saved] = (tmp_path / "runs" / "r" / "checkpoints").glob("step-*")
    number = saved.name.removeprefix("step-")
    assert f"interrupted after step {number}, saved in runs/r/checkpoints/{saved.name}\n" in said
    if how == "killed outright":
        assert said.count("femto: the launcher of this process is gone; it stops after this step") == 2


def wait_for(happened: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


# Other ranks


class Impatient:
    """Says sooner who is missing."""

    @hookimpl
    def femto_validate(self) -> None:
        meeting.FIRST_WORD_S, meeting.NEXT_WORD_S = 0.5, 1.0


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "ranks 1, 2 of 3 not there yet at"), (2, "rank 2 cannot reach rank 0 at")]
)
def test_a_lone_rank_says_who_is_missing(rank: int, missing: str, dataset: Path, tmp_path: Path) -> None:
    words = [*TINY_FLAGS, "--data.path", str(dataset), "--train.timeout", "3"]
    [done] = forked(words, tmp_path, [world(3)[rank]], {"plugin": Impatient()})
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) >= 3, done.err
    for line in lines:
        assert missing in line
        assert "MASTER_ADDR = 127.0.0.1, MASTER_PORT = " in line
    assert lines[0].startswith("femto: rank")
    assert "s so far" in lines[0]
    assert lines[-1].endswith("start every rank, or raise --train.timeout")


def test_a_port_in_use_is_named(dataset: Path, tmp_path: Path) -> None:
    place = world(2)[0]
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [*TINY_FLAGS, "--data.path", str(dataset)]
        [done] = forked(words, tmp_path, [{**place, "MASTER_PORT": str(port)}])
    assert done.code == 2
    assert done.err == f"femto: port {port} cannot be opened on rank 0: Address already in use\n"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x"}, "RANK = 'x' (in the environment): must be a whole number from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0' (in the environment): must be a whole number from 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set in the environment"),
    ],
)
def test_a_wrong_environment_is_one_sentence(
    variables: dict[str, str], said: str, dataset: Path, tmp_path: Path
) -> None:
    alone = {**world(1)[0], "WORLD_SIZE": "2"} if "RANK" in variables else world(1)[0]
    [done] = forked([*TINY_FLAGS, "--data.path", str(dataset)], tmp_path, [{**alone, **variables}])
    assert done.code == 2, done
    assert said in done.err
    assert done.err.count("\n") == 1, done.err


def test_ranks_with_other_settings_name_the_key_and_both_values(dataset: Path, tmp_path: Path) -> None:
    words = [*TINY_FLAGS, "--data.path", str(dataset)]
    done = forked(words, tmp_path, world(2), {"plugin": OtherSettings()})
    assert [one.code for one in done] == [2, 2]
    assert "rank 1 differs from rank 0 in config: optim.eps is 1.0 there and 1e-08 on rank 0;" in done[0].err


class OtherSettings:
    @hookimpl
    def femto_config_defaults(self) -> dict[str, dict[str, float]]:
        return {"optim": {"eps": 1.0}} if os.environ["RANK"] == "1" else {}


def test_a_defect_on_every_rank_is_told_once(dataset: Path, tmp_path: Path) -> None:
    plugin = install_plugin(tmp_path / "site", "broken", BROKEN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = [*TINY_FLAGS, "--data.path", str(dataset), "--plugins", "broken"]
    done = subprocess.run(
        [*torchrun, "femto_core", *words],
        cwd=tmp_path,
        env=environment(plugin),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode != 0
    assert done.stderr.count("ArithmeticError: every rank has had enough") == 1, done.stderr


BROKEN = """
from femto_core.hookspecs import hookimpl

@hookimpl
def femto_step_begin(step):
    if step == 2:
        raise ArithmeticError("every rank has had enough")
"""


class NotANumber:
    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        with torch.no_grad():
            for share in trainer.shares:
                share.master.fill_(float("nan"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_no_numbers_end_every_rank_alike(ranks: int, dataset: Path, tmp_path: Path) -> None:
    done = run(dataset, tmp_path, NotANumber(), "--train.max-skipped", "3", ranks=ranks)
    assert [one.code for one in done] == [2] * ranks, done
    said = "femto: step 3: the last 3 steps left the weights untouched, this one because of a gradient norm that is not"
    assert said in done[0].err
    assert all("Traceback" not in one.err for one in done)


def test_samples_end_where_the_context_does(dataset: Path, tmp_path: Path) -> None:
    [done] = run(dataset, tmp_path, object(), "--sample.tokens", "5000", "--train.steps", "2")
    assert done.code == 0, done.err
    assert "sample   sample.tokens = 5000: samples end where the model's context of 16 tokens does" in done.out
    samples = [json.loads(line) for line in (tmp_path / "runs/r/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6


# Streams


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("plugins > /dev/full", 2, "femto: standard output cannot be written: No space left on device\n"),
        ("hooks > /dev/full", 2, "femto: standard output cannot be written: No space left on device\n"),
        ("plugins >&-", 2, "femto: standard output is closed; send it to a file, or to /dev/null\n"),
        ("plugins 2>&- > /dev/null", 0, ""),
        ("plugins --nothing 2>&-", 2, ""),
    ],
)
def test_a_stream_that_takes_nothing_is_one_sentence(command: str, code: int, said: str, tmp_path: Path) -> None:
    words = ["bash", "-c", f"{sys.executable} -m femto_core {command}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_screen_that_is_narrower_than_unicode_gets_escapes() -> None:
    source = "from femto_ops.streams import prepare_process; assert not prepare_process(); print('caf\\u00e9 \\u65e5')"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "caf\\xe9 \\u65e5\n"), done.stderr


# The folder


def test_a_run_that_is_alive_is_called_so_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_S", 0.1)
    alone: Any = SimpleNamespace(rank=0, from_first=lambda value: value)
    config: Any = SimpleNamespace(run=RunSection(dir=str(tmp_path), name="r"), checkpoint=CheckpointSection())
    folder, lock = run_folder.make_run_folder(config, alone)
    (folder / "metrics.jsonl").write_text("")
    who = f"{folder} is in use: process {os.getpid()} on {socket.gethostname()} is training there now"
    with pytest.raises(UserError, match=who):
        run_folder.make_run_folder(config, alone)
    lock.release()
    with pytest.raises(UserError, match="holds an earlier run"):
        run_folder.make_run_folder(config, alone)


# The screen


@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")
@pytest.mark.parametrize(("columns", "bar"), [(80, False), (120, True)])
def test_a_terminal_shows_what_matters_on_one_line(columns: int, bar: bool, dataset: Path, tmp_path: Path) -> None:
    words = [*TINY_FLAGS, "--data.path", str(dataset), "--sample.prompts"]
    tmux = ["tmux", "-L", f"femto-{os.getpid()}-{columns}", "-f", "/dev/null"]
    command = f"cd {tmp_path} && env -u COLUMNS {sys.executable} -m femto_core {' '.join(words)}; echo DONE; sleep 100"
    subprocess.run([*tmux, "new-session", "-d", "-x", str(columns), "-y", "50", command], check=True)

    def screen() -> list[str]:
        shown = subprocess.run([*tmux, "capture-pane", "-p"], capture_output=True, text=True, check=True)
        return shown.stdout.splitlines()

    try:
        wait_for(lambda: "DONE" in screen())
        [line] = [line for line in screen() if "4/4" in line]
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    assert len(line) <= columns
    for word in ("loss ", " lr ", " tok/s", " MiB"):
        assert word in line
    assert line.count("left") == 1
    assert line.endswith("0:00 left")
    assert ("[####" in line) is bar
