"""What people look at: judgements that are right, records that survive, plots that exist."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from femto_core.errors import UserError
from femto_core.layout import ParamLayout
from femto_core.metrics import StepInfo
from femto_core.precision import ParamShare
from femto_report.jsonl import read_lines
from femto_report.logs import Logs
from femto_report.profiler import Profiler, ProfileSection
from femto_report.progress import LogSection, ProgressReport, clock, fields_of, live_line
from femto_report.recorder import Recorder, plot_loss, running_mean
from femto_report.samples import draw
from femto_report.sanity import SanityReport, first_loss, gradient_norms, memory
from femto_report.trackers import TensorBoard, WandB
from femto_report.writing import say


def fake_trainer(
    tmp_path: Path,
    *,
    rank: int = 0,
    step: int = 0,
    path: str = "",
    steps: int = 8,
    end: int = 8,
    skipped: int = 0,
    every: int = 0,
) -> Any:
    """The parts of a trainer that observers look at."""
    parameter = torch.nn.Parameter(torch.zeros(256, 1024))
    layout = ParamLayout.whole("w", parameter.shape, ())
    config = SimpleNamespace(
        model=SimpleNamespace(path=path, weights="load"),
        train=SimpleNamespace(steps=steps, stop_after=0),
        optim=SimpleNamespace(clip=1.0),
        checkpoint=SimpleNamespace(every=every),
        data=SimpleNamespace(seq_len=4, global_batch=2, micro_batch=2),
        section=lambda cls: {LogSection: LogSection(every=3), ProfileSection: ProfileSection(step=1)}[cls],
        to_dict=lambda: {"train": {"steps": steps}},
    )
    return SimpleNamespace(
        config=config,
        mesh=SimpleNamespace(
            rank=rank, device=torch.device("cpu"), row_axes=("dp",), size=lambda *_: 1, from_first=lambda value: value
        ),
        stage=SimpleNamespace(config=SimpleNamespace(vocab_size=1000, model_type="llama")),
        loader=SimpleNamespace(accumulation=1),
        dataset=range(9),
        shares=[ParamShare(name="w", compute=parameter, master=parameter, layout=layout)],
        plugin_versions={},
        run_dir=tmp_path,
        step=step,
        end=end,
        skipped=skipped,
    )


METRICS = {
    "loss": 2.5,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "tokens": 8.0,
    "skipped": 0.0,
    "tokens_per_s": 1234.0,
    "tflops": 0.5,
    "peak_memory_mib": 99.0,
}


class TestSanity:
    def test_a_random_model_starts_near_ln_of_the_vocabulary(self, tmp_path: Path) -> None:
        trainer = fake_trainer(tmp_path)
        assert first_loss(trainer, math.log(1000) + 0.1).startswith("sane")
        assert "the loss is wrong" in first_loss(trainer, math.log(1000) + 3)
        assert "the initialisation is wrong" in first_loss(trainer, math.log(1000) - 3)

    def test_a_loaded_model_must_know_something(self, tmp_path: Path) -> None:
        trainer = fake_trainer(tmp_path, path="model")
        assert "did the weights load" in first_loss(trainer, math.log(1000))
        assert first_loss(trainer, 2.0).startswith("sane")

    def test_norms_outside_their_usual_range_are_warned_of(self) -> None:
        assert gradient_norms([0.5, 0.7, math.inf], clip=1.0).startswith("sane")
        assert gradient_norms([0.01] * 3, clip=1.0).startswith("WARNING")
        assert gradient_norms([50.0] * 3, clip=0.0).startswith("WARNING")
        assert "should be the exception" in gradient_norms([2.0] * 3, clip=1.0)
        assert "nothing was learnt" in gradient_norms([math.nan], clip=1.0)

    def test_memory_counts_weights_gradients_and_two_moments(self, tmp_path: Path) -> None:
        trainer = fake_trainer(tmp_path)  # 2 ** 18 parameters in fp32: 1 MiB each for all four
        assert "rank 0's weights, gradients and optimizer state need 4 MiB" in memory(trainer, 50.0)
        assert memory(trainer, 3.0).startswith("WARNING")


class TestRecorder:
    def test_metrics_of_a_past_that_did_not_happen_are_dropped_on_resume(self, tmp_path: Path) -> None:
        lines = [{"step": step, "loss": float(step)} for step in (1, 2, 3)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
        recorder = Recorder()
        recorder.femto_train_begin(fake_trainer(tmp_path, step=2))
        recorder.femto_log(3, {"loss": 9.0})
        recorder.femto_train_end()
        assert [(m["step"], m["loss"]) for m in read_lines(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 9)]

    def test_a_kill_while_metrics_are_cut_loses_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
        before = path.read_bytes()

        def killed(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Recorder().femto_train_begin(fake_trainer(tmp_path, step=1))
        assert path.read_bytes() == before

    def test_a_loss_that_is_not_a_number_is_valid_json(self, tmp_path: Path) -> None:
        recorder = Recorder()
        recorder.femto_train_begin(fake_trainer(tmp_path))
        recorder.femto_log(1, {"loss": math.nan, "grad_norm": math.inf})
        recorder.femto_train_end()
        assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None}]
        assert not (tmp_path / "loss.png").exists(), "there is nothing to plot"

    def test_each_line_is_on_disk_at_once(self, tmp_path: Path) -> None:
        recorder = Recorder()
        recorder.femto_train_begin(fake_trainer(tmp_path))
        recorder.femto_log(1, {"loss": 1.0})
        assert len(read_lines(tmp_path / "metrics.jsonl")) == 1
        recorder.femto_train_end()

    def test_other_ranks_write_nothing(self, tmp_path: Path) -> None:
        recorder = Recorder()
        recorder.femto_train_begin(fake_trainer(tmp_path, rank=1))
        recorder.femto_log(1, {"loss": 1.0})
        recorder.femto_train_end()
        assert not list(tmp_path.iterdir())

    def test_the_plot_is_drawn_from_what_was_recorded(self, tmp_path: Path) -> None:
        lines = [{"step": 1, "loss": 3.0}, {"step": 1, "held_out_loss": 3.1}, {"step": 2, "loss": None}]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        plot_loss(tmp_path)
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")

    def test_the_running_mean_is_not_pulled_towards_zero_at_its_start(self) -> None:
        assert running_mean([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])


class TestProgress:
    def test_plain_lines_come_first_last_and_every_few_steps(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = ProgressReport()
        trainer = fake_trainer(tmp_path)
        report.femto_train_begin(trainer)
        for step in range(1, 9):
            report.femto_log(trainer, step, METRICS)
        report.femto_log(trainer, 8, {"held_out_loss": 2.25})
        report.femto_train_end(trainer, None)
        out = capsys.readouterr().out
        assert [line.split()[1] for line in out.splitlines() if "/8" in line] == ["1/8", "3/8", "6/8", "8/8"]
        assert "held_out_loss 2.2500" in out

    def test_skipped_steps_are_said_with_their_reason(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = ProgressReport()
        trainer = fake_trainer(tmp_path)
        report.femto_train_begin(trainer)
        report.femto_log(trainer, 1, {**METRICS, "skipped": 1.0})
        report.femto_log(trainer, 2, {**METRICS, "skipped": 2.0, "tokens": 0.0})
        report.femto_train_end(trainer, None)
        out = capsys.readouterr().out
        assert "step 1: weights left untouched because of a gradient norm that is not finite" in out
        assert "step 2: weights left untouched because of no valid target (2 such steps so far)" in out

    def test_steps_that_were_skipped_before_a_resume_are_not_news(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = ProgressReport()
        trainer = fake_trainer(tmp_path, step=4, skipped=2)
        report.femto_train_begin(trainer)
        report.femto_log(trainer, 5, {**METRICS, "skipped": 2.0})
        assert "untouched" not in capsys.readouterr().out
        report.femto_log(trainer, 6, {**METRICS, "skipped": 3.0})
        assert "step 6: weights left untouched" in capsys.readouterr().out
        report.femto_train_end(trainer, None)

    def test_a_run_that_is_to_stop_early_ends_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = ProgressReport()
        trainer = fake_trainer(tmp_path, steps=100, end=5)
        report.femto_train_begin(trainer)
        for step in range(1, 6):
            report.femto_log(trainer, step, METRICS)
        report.femto_train_end(trainer, None)
        out = capsys.readouterr().out
        assert "steps 1 to 5" in out
        assert [line.split()[1] for line in out.splitlines() if "/5" in line] == ["1/5", "3/5", "5/5"]
        assert "0:00 left" in out.splitlines()[-1]

    def test_mfu_is_shown_where_the_peak_is_known(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        report = ProgressReport()
        trainer = fake_trainer(tmp_path)
        report.femto_train_begin(trainer)
        report.femto_log(trainer, 1, {**METRICS, "mfu": 0.415})
        report.femto_train_end(trainer, None)
        assert "MFU 41.5%" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("every", "kept"),
        [(0, "; nothing is saved, because checkpoint.every = 0"), (5, ", saved in {}/checkpoints/step-4")],
    )
    def test_a_run_that_was_asked_to_stop_says_so_and_what_is_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int, kept: str
    ) -> None:
        report, trainer = ProgressReport(), fake_trainer(tmp_path, every=every)
        report.femto_train_begin(trainer)
        trainer.step = 4
        report.femto_train_end(trainer, None)
        assert capsys.readouterr().err == f"interrupted after step 4{kept.format(tmp_path)}\n"

    @pytest.mark.parametrize(("rank", "step", "error"), [(0, 4, KeyError("x")), (0, 8, None), (1, 4, None)])
    def test_nobody_says_that_a_run_was_asked_to_stop_which_failed_or_was_done_and_no_other_rank_does(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, step: int, error: Exception | None
    ) -> None:
        report, trainer = ProgressReport(), fake_trainer(tmp_path, rank=rank)
        report.femto_train_begin(trainer)
        trainer.step = step
        report.femto_train_end(trainer, error)
        assert capsys.readouterr().err == ""

    def test_time_left_reads_like_a_clock(self) -> None:
        assert [clock(s) for s in (5, 65, 3661)] == ["0:05", "1:05", "1:01:01"]


FIELDS = fields_of(
    123,
    450,
    {**METRICS, "grad_norm": 1.234, "tokens_per_s": 12345.0, "tflops": 0.123, "peak_memory_mib": 1234.0},
    3723.0,
)


FULL = "  ".join(FIELDS)


@pytest.mark.parametrize("width", range(201))
def test_a_live_line_fits_the_terminal_and_keeps_what_matters_first(width: int) -> None:
    line = live_line(FIELDS, 0.25, width)
    assert len(line) <= width
    kept = [field for field in FIELDS if field in line]
    assert line.endswith("  ".join(kept)) or width < len(FIELDS[0])
    order = ["step", "loss", "left", "tok/s", "MiB", "lr", "norm", "TFLOP/s"]
    ranks = [next(n for n, word in enumerate(order) if word in field.split()) for field in kept]
    assert sorted(ranks) == list(range(len(ranks))), "nothing is kept before what matters more"
    if width >= 79:
        assert set(order[:6]) <= {word for field in kept for word in field.split()}


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (79, "step   123/450  loss 2.5000  lr 1.00e-03  12,345 tok/s  1,234 MiB  1:02:03 left"),
        (60, "step   123/450  loss 2.5000  12,345 tok/s  1:02:03 left"),
        (119, FULL),
        (130, f"[#####...............]  {FULL}"),
    ],
)
def test_a_bar_comes_where_there_is_room_and_the_time_left_once(width: int, line: str) -> None:
    assert live_line(FIELDS, 0.25, width) == line


def test_a_full_screen_is_warned_of_once_and_drops_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        say("one")
        say("two")
        full.flush()
    assert capsys.readouterr().err == (
        "WARNING  standard output cannot be written: No space left on device; training goes on without it\n"
    )


def step_info(step: int, *, skipped: bool, skipped_total: int) -> StepInfo:
    return StepInfo(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=8,
        skipped=skipped,
        skipped_total=skipped_total,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("limit", "end", "skipped", "ends_at"),
    [
        (100, 450, range(1, 450), 10),
        (100, 4, range(1, 5), 4),
        (3, 450, range(1, 450), 3),
        (100, 450, range(2, 450), 101),
        (5, 450, [2, 3, 4, 5, 7, 8, 9, 10, 11, 12], 11),
        (5, 450, [2, 3, 4, 5, 7, 8, 9, 10], 0),
        (0, 450, range(1, 450), 0),
    ],
)
def test_a_run_that_leaves_the_weights_untouched_ends(
    limit: int, end: int, skipped: Sequence[int], ends_at: int, tmp_path: Path
) -> None:
    sanity, trainer = SanityReport(), fake_trainer(tmp_path, end=end)
    trainer.config.train.max_skipped = limit
    sanity.femto_train_begin()
    said = dict[int, str]()
    for step in range(1, end + 1):
        info = step_info(step, skipped=step in skipped, skipped_total=sum(s <= step for s in skipped))
        try:
            sanity.femto_step_end(trainer, info)
        except UserError as error:
            said[step] = str(error)
            break
    assert list(said) == [ends_at] * bool(ends_at)
    for text in said.values():
        assert f"step {ends_at}: the last " in text
        assert "a gradient norm that is not finite" in text


@pytest.mark.parametrize(
    ("first", "stop_after", "said"),
    [
        (9, 0, "profile.step = 9 lies beyond train.steps = 8"),
        (5, 4, "profile.step = 5 lies beyond train.stop_after = 4"),
    ],
)
def test_a_trace_beyond_the_run_is_refused(first: int, stop_after: int, said: str, tmp_path: Path) -> None:
    config = fake_trainer(tmp_path).config
    config.section, config.train.stop_after = lambda _: ProfileSection(step=first), stop_after
    with pytest.raises(UserError, match=said):
        Profiler().femto_validate(config)
    config.section = lambda _: ProfileSection(step=4)
    Profiler().femto_validate(config)


def test_a_trace_of_steps_that_are_done_already_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Profiler().femto_train_begin(fake_trainer(tmp_path, step=5))
    assert capsys.readouterr().err == "WARNING  profile.step = 1: the run goes on at step 6, so nothing is traced\n"


def test_logits_that_are_not_numbers_draw_nothing() -> None:
    assert draw(torch.tensor([0.0, math.nan]), 0.7, torch.Generator()) is None
    assert draw(torch.tensor([0.0, math.nan]), 0.0, torch.Generator()) is None
    assert draw(torch.tensor([0.0, 1.0]), 1e-3, torch.Generator()) == 1


def test_drawing_at_temperature_zero_takes_the_likeliest_and_is_repeatable_above() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert draw(logits, 0.0, torch.Generator()) == 1
    draws = [[draw(logits, 1.0, torch.Generator().manual_seed(s)) for s in range(20)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert set(draws[0]) > {1}


def test_a_rank_logs_the_exception_that_ended_it(tmp_path: Path) -> None:
    logs = Logs()
    trainer = fake_trainer(tmp_path, rank=3, step=7)
    logs.femto_train_begin(trainer)
    try:
        raise ArithmeticError("enough")
    except ArithmeticError as error:
        logs.femto_train_end(trainer, error)
    text = (tmp_path / "logs" / "rank-3.log").read_text()
    assert "training ends after step 7" in text
    assert "ArithmeticError: enough" in text


def test_a_run_that_ends_well_leaves_no_traceback_whatever_the_caller_is_handling(tmp_path: Path) -> None:
    logs, trainer = Logs(), fake_trainer(tmp_path, step=8)
    try:
        raise ArithmeticError("of somebody else")
    except ArithmeticError:
        logs.femto_train_begin(trainer)
        logs.femto_train_end(trainer, None)
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert " INFO femto: training ends after step 8" in text
    assert "somebody else" not in text
    assert "Traceback" not in text


def test_a_rank_on_a_machine_of_its_own_makes_the_folder_of_its_log_and_trace(tmp_path: Path) -> None:
    trainer = fake_trainer(tmp_path / "runs" / "r", rank=3)
    logs = Logs()
    logs.femto_train_begin(trainer)
    logs.femto_train_end(trainer, None)
    assert (trainer.run_dir / "logs" / "rank-3.log").exists()
    trainer.run_dir = tmp_path / "other" / "r"
    profiler = Profiler()
    profiler.femto_step_begin(trainer, 1)
    profiler.femto_train_end(trainer)
    assert (trainer.run_dir / "trace-rank-3.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_rank_0_warns_of_is_on_the_screen_and_in_its_log(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    trainer, logs = fake_trainer(tmp_path, rank=rank), Logs()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.femto_train_begin(trainer)
        warnings.warn("thin ice", UserWarning, stacklevel=1)
        logging.getLogger("skates").warning("thinner ice")
        logs.femto_train_end(trainer, None)
    shown, written = capsys.readouterr().err, (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    for text in ("UserWarning: thin ice", "thinner ice"):
        assert text in written
        assert shown.count(text) == (rank == 0)
    assert logging.getLogger().handlers == []


def test_logs_leave_the_capturing_of_warnings_as_it_was(tmp_path: Path) -> None:
    trainer, logs = fake_trainer(tmp_path), Logs()
    with warnings.catch_warnings():
        before = warnings.showwarning
        logs.femto_train_begin(trainer)
        assert warnings.showwarning is not before
        logs.femto_train_end(trainer, None)
        assert warnings.showwarning is before
        logging.captureWarnings(True)
        try:
            captured = warnings.showwarning
            logs.femto_train_begin(trainer)
            logs.femto_train_end(trainer, None)
            assert warnings.showwarning is captured
        finally:
            logging.captureWarnings(False)


@pytest.mark.parametrize(("tracker", "module"), [(TensorBoard(), "torch.utils.tensorboard"), (WandB(), "wandb")])
def test_a_tracker_whose_library_is_absent_says_how_to_get_it(
    tracker: Any, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="pip install 'femto-core"):
        tracker.femto_train_begin(fake_trainer(tmp_path))


def test_trackers_get_every_number_and_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = SimpleNamespace(log=lambda m, step: seen.append((step, m)), finish=lambda: seen.append("finished"))
    wandb = ModuleType("wandb")
    wandb.init = lambda **_: run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    writer = SimpleNamespace(add_scalar=lambda n, v, s: seen.append((s, {n: v})), close=lambda: seen.append("closed"))
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda _: writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    trackers: tuple[Any, ...] = (TensorBoard(), WandB())
    for tracker in trackers:
        tracker.femto_train_begin(fake_trainer(tmp_path))
        tracker.femto_log(1, {"loss": 2.0})
        tracker.femto_train_end()
    assert seen == [(1, {"loss": 2.0}), "closed", (1, {"loss": 2.0}), "finished"]
