"""Training from the command line: what it prints, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from femto_core.config import config_class, make_config
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.plugins import activate, hook_names
from femto_core.run_folder import make_run_folder
from femto_core.sections import CheckpointSection, RunSection
from femto_core.toml_file import read_toml
from tests.cli.commands import TINY_FLAGS, Finished, femto, forked, install_plugin, world


def test_a_run_leaves_all_that_it_promises(dataset: Path, tmp_path: Path) -> None:
    flags = ("--data.path", str(dataset), "--run.name", "r", "--eval.every", "2", "--checkpoint.every", "2")
    done = femto([*TINY_FLAGS, *flags, "--profile.step", "2"], tmp_path)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "r"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "tflops", "peak_memory_mib", "skipped"} <= steps[0].keys()
    assert [line["step"] for line in lines if "held_out_loss" in line] == [2, 4]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "env.json").read_text())["layout"] == "dp 1"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {0, 4}
    assert "training ends after step 4" in (run / "logs" / "rank-0.log").read_text()
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-2", "step-4"]
    assert (run / "checkpoints" / "latest").read_text().split()[-1] == "step-4"
    assert json.loads((run / "trace-rank-0.json").read_text())["traceEvents"]
    sections = Hooks(activate([]).manager).config_sections()
    again = make_config(config_class(sections), read_toml(run / "config.toml"), {})
    assert again.data.path == str(dataset)
    assert again.data.micro_batch > 0, "what was left out is spelt out in the record"


def test_the_output_says_what_is_trained_and_whether_it_is_sane(dataset: Path, tmp_path: Path) -> None:
    done = femto([*TINY_FLAGS, "--data.path", str(dataset)], tmp_path)
    assert "model    llama with" in done.out
    assert "layout   dp 1 on" in done.out
    assert "4 rows a step = 1 ranks x 1 micro-batches x 4" in done.out
    vocabulary = json.loads((dataset / "manifest.json").read_text())["vocab_size"]
    assert f"ln(vocabulary) {math.log(vocabulary):.3f}" in done.out
    for word in ("loss", "norm", "lr", "tok/s", "TFLOP/s", "MiB", "left"):
        assert word in done.out
    assert "gradient norm: median" in done.out
    assert "peak memory" in done.out
    assert done.err == ""


def test_one_command_starts_the_ranks_as_torchrun_does(dataset: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--train.dtype", "float64"]
    assert femto([*flags, "--run.name", "torchrun"], tmp_path, processes=2).code == 0
    (tmp_path / "two.toml").write_text("[run]\nnproc = 2\n")
    for name, words in (("flag", ["--nproc", "2"]), ("file", ["train", "two.toml"])):
        words = [*words, *flags] if name == "file" else [*flags, *words]
        done = started([*words, "--run.name", name], tmp_path)
        assert (done.code, done.err) == (0, ""), done.err
        assert "layout   dp 2" in done.out
        runs = tmp_path / "runs"
        texts = [(runs / run / "metrics.jsonl").read_text().splitlines() for run in ("torchrun", name)]
        losses = [[json.loads(line)["loss"] for line in lines] for lines in texts]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 4


def test_ranks_of_one_command_fail_with_the_failing_ranks_words_alone(tmp_path: Path) -> None:
    refused = started([*TINY_FLAGS, "--nproc", "2", "--data.path", "nowhere"], tmp_path)
    assert refused.code == 2
    assert refused.err.count("\n") <= 2, refused.err
    assert "nowhere" in refused.err
    assert "Traceback" not in refused.err
    mistyped = started([*TINY_FLAGS, "--nproc", "2", "--train.step", "2"], tmp_path)
    assert mistyped.code == 2
    assert mistyped.err.count("\n") == 1
    [under_torchrun, _] = forked([*TINY_FLAGS, "--nproc", "3"], tmp_path, world(2))
    assert under_torchrun.code == 2
    assert "--nproc 3: torchrun has started 2 processes here" in under_torchrun.err


def started(words: list[str], cwd: Path) -> Finished:
    """Run `femto WORDS` as the terminal does: the command starts its ranks with this interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "femto_core", *words], cwd=cwd, capture_output=True, text=True, timeout=180
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def test_two_processes_do_what_one_does(dataset: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--train.dtype", "float64"]
    assert femto([*flags, "--run.name", "one"], tmp_path).code == 0
    two = femto([*flags, "--run.name", "two"], tmp_path, processes=2)
    assert two.code == 0, two.err
    assert two.out.count("model    llama") == 1, "only rank 0 speaks"
    read = [
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for mine, theirs in zip(*read, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-9)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-9)


def test_settings_come_from_a_file_and_flags_win(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\npath = "{dataset}"\nseq_len = 16\nglobal_batch = 2\n[train]\nsteps = 9\n[optim]\nwarmup = 0\n'
        "[model]\nhidden_size = 16\nintermediate_size = 16\nlayers = 1\nheads = 1\nkv_heads = 1\n"
        '[run]\nname = "toml"\n[sample]\nprompts = []\n'
    )
    done = femto(["run.toml", "--train.steps", "2"], tmp_path)
    assert done.code == 0, done.err
    assert "2 rows a step" in done.out
    assert "step     2/2" in done.out


def test_stopped_and_resumed_equals_the_uninterrupted_run(dataset: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--checkpoint.every", "1"]
    assert femto([*flags, "--run.name", "whole"], tmp_path).code == 0
    assert femto([*flags, "--run.name", "cut", "--train.stop-after", "2"], tmp_path).code == 0
    resumed = femto([*flags, "--run.name", "cut", "--checkpoint.resume", "auto"], tmp_path)
    assert resumed.code == 0, resumed.err
    assert "steps 3 to 4" in resumed.out
    whole, cut = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    )
    assert [m["step"] for m in cut] == [1, 2, 3, 4]
    assert [(m["loss"], m["grad_norm"], m["lr"]) for m in cut] == [(m["loss"], m["grad_norm"], m["lr"]) for m in whole]


def test_an_earlier_run_is_not_overwritten(dataset: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--run.name", "r"]
    assert femto(flags, tmp_path).code == 0
    before = (tmp_path / "runs" / "r" / "metrics.jsonl").read_bytes()
    again = femto(flags, tmp_path)
    assert again.code == 2
    assert "holds an earlier run" in again.err
    assert (tmp_path / "runs" / "r" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("resume", "weights_only", "refused"),
    [
        ("none", False, True),
        ("auto", False, False),
        ("runs/r/checkpoints/step-2", False, False),
        ("auto", True, True),
        ("runs/r/checkpoints/step-2", True, True),
        ("runs/other/checkpoints/step-2", False, True),
        ("runs/other/checkpoints/step-2", True, True),
    ],
)
@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step-2"])
def test_only_what_goes_on_with_an_earlier_run_may_write_to_its_folder(
    left: str, resume: str, weights_only: bool, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "r" / left).mkdir(parents=True)
    section = CheckpointSection(resume=resume, weights_only=weights_only)
    config: Any = SimpleNamespace(run=RunSection(name="r"), checkpoint=section)
    alone: Any = SimpleNamespace(rank=0, from_first=lambda value: value)
    if refused:
        with pytest.raises(UserError, match="holds an earlier run"):
            make_run_folder(config, alone)
    else:
        make_run_folder(config, alone)[1].release()
    fresh: Any = SimpleNamespace(run=RunSection(name="new"), checkpoint=section)
    make_run_folder(fresh, alone)[1].release()


def test_hooks_are_called_in_the_order_of_the_specification(dataset: Path, tmp_path: Path) -> None:
    flags = ["--data.path", str(dataset), "--eval.every", "2", "--checkpoint.every", "2"]
    done = femto([*TINY_FLAGS, *flags], tmp_path, {"FEMTO_TRACE_HOOKS": "1"})
    assert done.code == 0, done.err
    first_calls = list(dict.fromkeys(re.findall(r"hook (\w+)\(", done.err)))
    others = {"femto_commands", "femto_export"}  # `train` is found without looking others up
    assert first_calls == [name for name in hook_names() if name not in others]


def test_runs_without_a_name_that_begin_in_one_second_keep_apart(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(run=RunSection(dir=str(tmp_path / "runs")), checkpoint=CheckpointSection())
    alone: Any = SimpleNamespace(rank=0, from_first=lambda value: value)
    made = [make_run_folder(config, alone) for _ in range(4)]
    assert len({folder for folder, _ in made}) == 4
    assert all(folder.is_dir() for folder, _ in made)
    for _, lock in made:
        lock.release()


FAILS_ON_RANK_1 = """
import os
from femto_core.hookspecs import hookimpl

@hookimpl
def femto_step_begin(step):
    if step == 3 and os.environ["RANK"] == "1":
        raise ArithmeticError("rank one has had enough")
"""


def test_one_rank_that_raises_ends_all_within_seconds_with_its_traceback(dataset: Path, tmp_path: Path) -> None:
    environment = install_plugin(tmp_path / "site", "fails", FAILS_ON_RANK_1)
    start = time.monotonic()
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--plugins", "fails"]
    done = femto(flags, tmp_path, environment, processes=2)
    assert done.code != 0
    assert "[rank 1] Traceback" in done.err
    assert "ArithmeticError: rank one has had enough" in done.err
    assert "[rank 0] Traceback" not in done.err, "the other rank's broken connection is not a second defect"
    assert time.monotonic() - start < 60, "start-up included"
    log = next((tmp_path / "runs").glob("*/logs/rank-1.log")).read_text()
    assert "rank one has had enough" in log


DIES_ON_RANK_1 = FAILS_ON_RANK_1.replace('raise ArithmeticError("rank one has had enough")', "os.kill(os.getpid(), 9)")


def test_one_rank_that_is_killed_ends_the_other(dataset: Path, tmp_path: Path) -> None:
    """Nobody else ends it: torchrun would."""
    plugin = install_plugin(tmp_path / "site", "dies", DIES_ON_RANK_1)
    flags = [*TINY_FLAGS, "--data.path", str(dataset), "--plugins", "dies"]
    start = time.monotonic()
    left, killed = forked(flags, tmp_path, [{**plugin, **place} for place in world(2)])
    assert time.monotonic() - start < 60, "start-up included"
    assert killed.code == -9
    assert left.code == 1
    assert "rank 0 lost contact with another rank" in left.err
    assert "Traceback" not in left.err


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second pseudo-terminal")
def test_on_a_terminal_there_is_a_live_bar(dataset: Path, tmp_path: Path) -> None:
    import os
    import pty
    import subprocess

    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "femto_core", *TINY_FLAGS, "--data.path", str(dataset), "--sample.prompts"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=inner, stderr=inner, env={**os.environ, "COLUMNS": "200"})
    os.close(inner)
    shown = b""
    while True:
        try:
            part = os.read(outer, 65536)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        shown += part
    os.close(outer)
    assert process.wait(60) == 0, shown
    assert b"step     4/4" in shown
    assert b"\x1b[" in shown, "drawn with terminal control codes"
