"""Bad input gets one clear sentence on rank 0 and exit code 2, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from femto_core.cli import run_command
from femto_core.errors import UserError
from femto_data.config import PreprocessConfig
from femto_data.preprocess import preprocess
from tests.cli.commands import TINY_FLAGS, environment, femto

CASES: dict[str, tuple[list[str], str]] = {
    "unknown flag": (["--train.step", "5"], "unknown flag --train.step; did you mean '--train.steps'?"),
    "unknown section": (["--tran.steps", "5"], "did you mean '--train.steps'?"),
    "wrong type": (["--train.steps", "ten"], "train.steps = 'ten' (on the command line): must be a whole number"),
    "out of range": (["--optim.lr", "0"], "optim.lr = '0' (on the command line): must lie in (0, 1e6]"),
    "choice": (["--optim.schedule", "cosin"], "did you mean 'cosine'?"),
    "no such file": (["nothing.toml"], "config file nothing.toml does not exist"),
    "no such data": (["--data.path", "nowhere"], "nowhere/train.safetensors"),
    "no such model": (["--model.path", "nowhere"], "is not a Hugging Face model directory"),
    "no such plugin": (["--plugins", "tq"], "plugin 'tq' is not installed"),
    "no such command": (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    "flag without value": (["--train.steps"], "--train.steps needs a value"),
    "value without flag": (["--train.steps", "3", "4"], "unexpected argument '4'"),
    "batch does not divide": (["--data.global-batch", "5", "--data.micro-batch", "2"], "is not a multiple of"),
    "too few rows": (["--data.global-batch", "5000"], "rows do not fill one global batch of 5000"),
    "odd heads": (["--model.heads", "3", "--model.hidden-size", "16"], "heads of even width"),
    "kv heads do not divide": (["--model.heads", "4", "--model.kv-heads", "3"], "must divide model.heads"),
    "warm-up too long": (["--optim.warmup", "9", "--train.steps", "4"], "must be less than train.steps"),
    "stop beyond the end": (["--train.stop-after", "9", "--train.steps", "4"], "lies beyond train.steps"),
    "seq_len differs": (["--data.seq-len", "32"], "femto preprocess --seq-len 32"),
    "vocabulary too small": (["--model.vocab-size", "40"], "the model has only 40"),
    "checkpoint missing": (["--checkpoint.resume", "nowhere"], "checkpoint.resume = 'nowhere'"),
    "name outside": (
        ["--run.name", "../x"],
        "run.name = '../x' (on the command line): must name a folder",
    ),
    "absolute name": (["--run.name", "/tmp/x"], "must name a folder within run.dir"),
    "name is here": (["--run.name", "."], "run.name = '.' (on the command line): must name a folder within run.dir"),
    "long name": (["--run.name", "x" * 300], "must name a folder within run.dir, in at most 200 bytes"),
    "cold samples": (["--sample.temperature", "1e-300"], "must be 0, or at least 0.001"),
    "trace beyond the end": (["--profile.step", "5", "--train.steps", "4"], "lies beyond train.steps = 4"),
    "patience": (["--train.timeout", "1e300"], "must lie in (0, 1e7]"),
    "seed": (
        ["--train.seed", str(2**63)],
        "(on the command line): must lie in [0, 2^62)",
    ),
    "threads": (["--train.threads", "100000"], "(on the command line): must lie in [0, 1024]"),
    "loader processes": (["--data.workers", "100000"], "(on the command line): must lie in [0, 256]"),
    "vocabulary too large": (["--model.vocab-size", str(10**8)], "(on the command line): must lie in [0, 2^24]"),
    "seat empty": (["--plugins", "no:defaults"], "nobody takes the seat femto_"),
}


@pytest.fixture
def lone_process() -> Iterator[None]:
    """End the process group that a command left behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_one_sentence(
    case: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, words = CASES[case]
    tiny = [*TINY_FLAGS, "--data.path", str(dataset)]
    for flag in {word for word in arguments if word.startswith("--")} & set(tiny):
        at = tiny.index(flag)
        del tiny[at : at + 2]
    positional = arguments[:1] if not arguments[0].startswith("-") else []
    with pytest.raises(UserError) as refused:
        run_command([*positional, *tiny, *arguments[len(positional) :]])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize("case", ["wrong type", "vocabulary too small"], ids=["before torch", "after process groups"])
def test_the_sentence_comes_alone_with_exit_code_2(case: str, dataset: Path, tmp_path: Path) -> None:
    arguments, words = CASES[case]
    done = femto([*TINY_FLAGS[2:], "--data.path", str(dataset), *arguments], tmp_path)
    assert done.code == 2
    assert done.err.startswith("femto: ")
    assert words in done.err
    assert done.err.count("\n") == 1, done.err


def test_two_ranks_say_it_once(dataset: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--data.global-batch", "3", "--data.micro-batch", "1"]
    done = femto(flags, tmp_path, processes=2)
    assert done.code != 0
    assert done.err.count("is not a multiple of") == 1
    assert "femto_core/" not in done.err, "no traceback of femto's"


def test_more_ranks_than_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a few words, again and again, " * 8)
    arguments = ["preprocess", "--input", "one.txt", "--seq-len", "60", "--output", "rows", "--vocab-size", "300"]
    made = femto(arguments, tmp_path)
    assert made.code == 0, made.err
    flags = [*TINY_FLAGS, "--data.path", "rows", "--data.seq-len", "60", "--data.global-batch", "2"]
    done = femto(flags, tmp_path, processes=2)
    assert done.code != 0
    assert "too few for 2 data-parallel ranks" in done.err


def test_help_names_every_section_and_command(tmp_path: Path) -> None:
    done = femto(["train", "--help"], tmp_path)
    assert done.code == 0
    for section in ("run", "train", "model", "data", "optim", "eval", "sample", "checkpoint", "log", "profile"):
        assert f"--{section}." in done.out
    top = femto(["--help"], tmp_path)
    assert top.code == 0
    for command in ("train", "plugins", "hooks", "preprocess"):
        assert command in top.out


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path: Path) -> None:
    command = f"{sys.executable} -u -m femto_core hooks | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "# Hooks\n"
    assert done.stderr == ""


def test_a_deleted_working_directory_and_missing_docstrings_are_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    command = f"cd gone && rmdir ../gone && {sys.executable} -m femto_core plugins"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "femto: the working directory has been deleted; change to one that exists\n",
    )
    done = subprocess.run([sys.executable, "-OO", "-m", "femto_core"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("femto: PYTHONOPTIMIZE=2 (python -OO) removes docstrings")


def test_an_output_that_is_not_utf_8_gets_other_characters(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("tëxt № ☃ again and again " * 9, encoding="utf-8")
    preprocess(
        PreprocessConfig(input=(str(tmp_path / "text.txt"),), output=str(tmp_path / "rows"), seq_len=8, vocab_size=300),
        quiet=True,
    )
    command = [sys.executable, "-m", "femto_core", "data-inspect", str(tmp_path / "rows")]
    env = environment({"PYTHONIOENCODING": "ascii"})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| t\\xebxt \\u2116 \\u2603" in done.stdout


@pytest.mark.usefixtures("lone_process")
def test_a_file_of_the_data_stands_for_its_folder(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command([*TINY_FLAGS, "--data.path", str(dataset / "train.safetensors")]) == 0
