"""Killed at any moment, preprocessing leaves no output, the old or the new one; the next run makes the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedTokenizerBase

from femto_core.errors import UserError
from femto_data import preprocess as module
from femto_data import shards
from femto_data.config import PreprocessConfig
from femto_data.encoder import TokenizerPool
from femto_data.workspace import Interrupted, open_workspace
from tests.data.making import contents, refusal, run, texts

DOCUMENTS = [f"document {i}: " + " ".join(str(i * j) for j in range(60)) for i in range(400)]

# A script for a process without threads, so that it can fork one child for each kill.
KILLS = """
import json, os, random, shutil, signal, sys, time
sys.path.append(sys.argv[1])  # marks the command lines of the processes that tokenise
from femto_data import shards
from femto_data.config import PreprocessConfig
from femto_data.preprocess import preprocess
from tests.data.making import contents
from pathlib import Path

shards.CHARACTERS = 10_000
folder = Path(sys.argv[1])
base = dict(input=(str(folder / "docs.jsonl"),), seq_len=32, vocab_size=300, output=str(folder / "out"), held_out=0.1)
new = PreprocessConfig(**base)
old = PreprocessConfig(**{**base, "seq_len": 16})
workers = PreprocessConfig(**base, workers=2)

def child(work):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return pid

def whole(config):
    assert os.waitpid(child(lambda: preprocess(config, quiet=True)), 0)[1] == 0
    return contents(folder / "out")

def state():
    if not (folder / "out").exists():
        return "absent"
    return {before: "old", after: "new"}.get(tuple(contents(folder / "out").items()), "mixed")

start = time.perf_counter()
after = tuple(whole(new).items())
duration = time.perf_counter() - start
before = tuple(whole(old).items())
kept = shutil.copytree(folder / "out", sys.argv[3])
seen = []

def finish(name, killed):
    again = whole(new)
    left = sorted(path.name for path in folder.iterdir())
    seen.append([name, killed, tuple(again.items()) == after, left])
    put_old()

def put_old():
    shutil.rmtree(folder / "out")
    shutil.copytree(kept, folder / "out")

if sys.argv[2] == "moments":
    chance = random.Random(0)
    for moment in range(8):
        pid = child(lambda: preprocess(workers if moment % 2 else new, quiet=True))
        time.sleep(duration * (moment + chance.random()) / 8)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        finish(f"moment {moment}", state())
else:
    rename, count = os.replace, 0
    def counted(source, target):
        global count
        rename(source, target)
        count += 1
    os.replace = counted
    preprocess(new, quiet=True)  # in this process, to know the number of renames
    os.replace = rename
    put_old()
    for at in range(count):
        # All shards are alike, so only the renames of the first ones are tested.
        if 2 < at < count - 7:
            continue
        for when in ("before", "after"):
            def kill(source, target, done=[0]):
                if when == "before" and done[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(source, target)
                if done[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                done[0] += 1
            os.replace = kill
            status = os.waitpid(child(lambda: preprocess(new, quiet=True)), 0)[1]
            os.replace = rename
            assert os.WTERMSIG(status) == signal.SIGKILL
            finish(f"{when} rename {at} of {count}", state())
print(json.dumps(seen))
"""


def kills(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, how: str) -> list[tuple[str, str, bool, list[str]]]:
    texts(tmp_path / "docs.jsonl", *DOCUMENTS[:200])
    command = [sys.executable, "-c", KILLS, str(tmp_path), how, str(tmp_path_factory.mktemp("kept") / "old")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: list[tuple[str, str, bool, list[str]]] = json.loads(done.stdout)
    return seen


def test_killed_at_random_moments_the_output_is_old_or_new_and_the_next_run_completes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name, killed, same, left in kills(tmp_path, tmp_path_factory, "moments"):
        assert killed in ("absent", "old", "new"), name
        assert same, name
        assert left == ["docs.jsonl", "out"], name
    deadline = time.monotonic() + 20
    while tokenising(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not tokenising(tmp_path)


def test_killed_before_and_after_each_rename_the_output_is_old_or_new_and_the_next_run_completes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seen = kills(tmp_path, tmp_path_factory, "renames")
    assert {killed for _, killed, _, _ in seen} == {"absent", "old", "new"}  # the gap between the renames was hit
    for name, _, same, left in seen:
        assert same, name
        assert left == ["docs.jsonl", "out"], name


def tokenising(marker: Path) -> list[str]:
    """Living tokenising processes of the run that has `marker` in its path."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(marker) in command and "serve()" in command:
            found.append(process.name)
    return found


class Stopped(BaseException):
    """Raised in the place of KeyboardInterrupt."""


class Counting:
    """Stands in for the encoder: counts shards, and stops the run at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.stop_at: int | None = None
        self._real = module._encoder
        monkeypatch.setattr(module, "_encoder", self._encoder)
        monkeypatch.setattr(shards, "CHARACTERS", 10_000)

    @contextmanager
    def _encoder(self, tokenizer: PreTrainedTokenizerBase, config: PreprocessConfig) -> Iterator[Any]:
        with self._real(tokenizer, config) as encode:

            def counted(batch: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
                if self.calls == self.stop_at:
                    raise Stopped
                self.calls += 1
                return encode(batch)

            yield counted

    def made(self) -> int:
        """Number of shards made since the last call."""
        calls, self.calls = self.calls, 0
        return calls


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def stop(*_: Any, **__: Any) -> Any:
    raise Stopped


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that holds a few shards of the documents."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def stopped(tmp_path: Path, counting: Counting) -> tuple[Path, int, dict[str, bytes]]:
    """A source, its number of shards, its dataset, and a workspace whose run was stopped after 5 shards."""
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    run(tmp_path, source)
    whole, made = contents(tmp_path / "out"), counting.made()
    os.rename(tmp_path / "out", tmp_path / "whole")
    counting.stop_at = 5
    with pytest.raises(Stopped):
        run(tmp_path, source)
    assert counting.made() == 5
    counting.stop_at = None
    assert not (tmp_path / "out").exists()
    return source, made, whole


def test_the_same_arguments_go_on_and_make_the_same_bytes_even_with_other_workers(
    tmp_path: Path, counting: Counting, stopped: tuple[Path, int, dict[str, bytes]]
) -> None:
    source, shard_count, whole = stopped
    run(tmp_path, source, workers=2)
    assert counting.made() == shard_count - 5
    assert contents(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "out", "whole"]


def test_a_run_stopped_while_rows_are_written_tokenises_nothing_again(
    tmp_path: Path, counting: Counting, stopped: tuple[Path, int, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, whole = stopped

    def failing(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_splits", failing)
        with pytest.raises(UserError, match="no space"):
            run(tmp_path, source)
    counting.made()
    run(tmp_path, source)
    assert counting.made() == 0
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("change", ["vocab_size", "seed", "held_out", "source", "tokenizer"])
def test_what_other_arguments_sources_or_tokenizers_left_is_not_used_but_removed(
    tmp_path: Path, counting: Counting, stopped: tuple[Path, int, dict[str, bytes]], change: str
) -> None:
    source, _, _ = stopped
    changes: dict[str, Any] = {"vocab_size": {"vocab_size": 310}, "seed": {"seed": 1}, "held_out": {"held_out": 0.2}}
    settings = changes.get(change, {})
    if change == "source":
        state = source.stat()
        source.write_bytes(source.read_bytes().replace(b"document 0", b"DOCUMENT 0"))
        os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))  # only the contents tell
    if change == "tokenizer":
        settings = {"tokenizer": str(tmp_path / "whole/tokenizer")}
    run(tmp_path, source, **settings)
    made = counting.made()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "out", "whole"]
    fresh = tmp_path / "fresh"
    run(tmp_path, source, output=str(fresh), **settings)
    assert counting.made() == made
    assert contents(fresh) == contents(tmp_path / "out")


def test_a_full_disk_is_said_and_with_more_room_the_run_goes_on(
    tmp_path: Path, counting: Counting, small_disk: Path
) -> None:
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    with pytest.raises(UserError, match=r"cannot be completed \(No space left on device\); finished work is kept"):
        run(small_disk, source)
    assert not (small_disk / "out").exists()
    some = counting.made()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    run(small_disk, source)
    assert some > 5
    more = counting.made()
    run(tmp_path, source)
    assert some + more <= counting.made() + 2, "that many were being made when the disk was full"
    assert contents(tmp_path / "out") == contents(small_disk / "out")


def test_a_shard_that_is_damaged_is_refused_and_made_anew(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_splits", stop)
        with pytest.raises(Stopped):
            run(tmp_path, source)
    [shard] = tmp_path.glob(".out.*/shards/00000003.npy")
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"00000003\.npy is damaged or missing; all shards have been"):
        run(tmp_path, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl"]
    assert run(tmp_path, source).documents == len(DOCUMENTS)


def test_every_byte_is_on_disk_before_the_dataset_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    seen: list[Path] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def logged_replace(old: Path, new: Path) -> None:
        seen.append(Path(new))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    run(tmp_path, source)
    [named] = [place for place, path in enumerate(seen) if path == tmp_path / "out"]
    [made] = {path for path in seen[:named] if path.name == "dataset"}
    assert {made / file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*")} <= set(seen[:named])
    assert seen[named + 1] == tmp_path


def test_an_old_dataset_moved_aside_by_a_killed_run_comes_back_even_for_other_arguments(tmp_path: Path) -> None:
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    run(tmp_path, source)
    old = contents(tmp_path / "out")
    (tmp_path / ".out.partial-0123456789abcdef").mkdir()
    os.rename(tmp_path / "out", tmp_path / ".out.partial-0123456789abcdef/replaced")
    with pytest.raises(UserError, match="too few"):
        run(tmp_path, source, seq_len=10**6)
    assert contents(tmp_path / "out") == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "out"]


def test_two_runs_for_one_output_do_not_meet(tmp_path: Path) -> None:
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    with open_workspace(tmp_path / "out", "0123456789abcdef"):
        words = refusal(tmp_path, source)
        run(tmp_path, source, output=str(tmp_path / "other"))
    assert words == f"another process is writing {tmp_path}/out right now; wait for it, or name another directory"


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = texts(tmp_path / "docs.jsonl", *DOCUMENTS)
    real = shards.make_shards

    def changing(*arguments: Any, **options: Any) -> int:
        count = real(*arguments, **options)
        with source.open("a") as stream:
            stream.write('\n{"text": "late"}')
        return count

    monkeypatch.setattr(module, "make_shards", changing)
    with pytest.raises(UserError, match="was changed while it was read"):
        run(tmp_path, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl"]


def test_a_tokenising_process_that_dies_is_told_and_what_is_done_is_kept(
    tmp_path: Path, counting: Counting, stopped: tuple[Path, int, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, shard_count, whole = stopped
    call = TokenizerPool.__call__

    def killing(self: TokenizerPool, batch: Sequence[str]) -> Any:
        if counting.calls == 3:
            for process in self._all:
                process.kill()
        return call(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TokenizerPool, "__call__", killing)
        with pytest.raises(Interrupted, match=r"exit code -9.*fewer --workers, and it resumes"):
            run(tmp_path, source, workers=2)
    counting.made()
    run(tmp_path, source, workers=2)
    assert counting.made() < shard_count - 5
    assert contents(tmp_path / "out") == whole
