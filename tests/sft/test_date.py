"""Templates that write the date: it is a setting, fixed for a run, kept on resuming, and part of the cache's key."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from femto_core.config import Config, config_class, make_config
from femto_core.errors import UserError
from femto_sft.plugin import SupervisedFineTuning
from femto_sft.run_date import FILE, keep_date, run_date
from femto_sft.section import SFTSection
from femto_sft.template import Template
from tests.sft import making
from tests.sft.making import log_of, make_tokenizer, rows_of, said, texts, write_lines

YES = said(("user", "say yes"), ("assistant", "yes"))
TODAY = str(datetime.datetime.now().date())


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("%d %b %Y", "09 Mar 2026"),
        ("%Y-%m-%d", "2026-03-09"),
        ("%-d %B, %A", "9 March, Monday"),
        ("%H:%M:%S", "00:00:00"),
        ("day %j of %y, 100 %", "day 068 of 26, 100 %"),
    ],
)
def test_the_clock_writes_what_strftime_would(format: str, text: str) -> None:  # noqa: A002 - strftime's word
    day = datetime.date(2026, 3, 9)
    assert day.strftime(format) == text
    source = "\n{% if strftime_now is defined %}{% set now = strftime_now(FORMAT) %}{{ 'Today: ' + now }}{% endif %}"
    template = Template(make_tokenizer(source.replace("FORMAT", repr(format))), day)
    assert template.render(YES["messages"]).text == f"\nToday: {text}"


def test_other_templates_are_rendered_as_transformers_does() -> None:
    tokenizer = make_tokenizer("\n" + making.WITH_BOS)
    rendered = Template(tokenizer, datetime.date(2026, 3, 9)).render(YES["messages"])
    assert rendered.text == tokenizer.apply_chat_template(YES["messages"], tokenize=False)


def test_the_date_decides_the_rows_of_a_template_with_a_clock_and_no_others(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES)
    dates = ("2026-03-09", "2026-03-10")
    first, other = (rows_of(tmp_path, file, template=making.DATED, date=date) for date in dates)
    assert texts(first)[0].startswith("Today: 09 Mar 2026\n")
    assert texts(other)[0].startswith("Today: 10 Mar 2026\n")
    assert first.fingerprint != other.fingerprint
    assert "the chat template writes the date, 2026-03-10 (sft.date)" in log_of(other, file)
    plain = [rows_of(tmp_path, file, date=date) for date in (*dates, "")]
    assert len({rows.fingerprint for rows in plain}) == 1
    assert "writes the date" not in log_of(plain[0], file)


def test_no_date_means_today(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES)
    found = [rows_of(tmp_path, file, template=making.DATED, date=date).fingerprint for date in ("", TODAY)]
    assert found[0] == found[1]


@pytest.mark.parametrize("date", ["9 March", "2026-13-01", "today"])
def test_a_date_that_is_none_is_refused(date: str) -> None:
    with pytest.raises(UserError, match=r"sft.date = .* must be a date such as 2026-01-31"):
        config(sft={"date": date})


def config(**sections: dict[str, Any]) -> Config:
    return make_config(config_class({"sft": SFTSection}), sections, {})


def test_a_run_that_goes_on_keeps_its_date(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path), "name": "one"}
    auto = {"run": run, "checkpoint": {"resume": "auto"}}
    assert run_date(config(**auto)) == TODAY
    (tmp_path / "one" / "checkpoints" / "step-4").mkdir(parents=True)
    keep_date(tmp_path / "one", "2026-03-09")
    assert run_date(config(**auto)) == "2026-03-09"
    path = str(tmp_path / "one" / "checkpoints" / "step-4")
    assert run_date(config(checkpoint={"resume": path})) == "2026-03-09"
    assert run_date(config(checkpoint={"resume": path}, sft={"date": "2026-03-10"})) == "2026-03-10"
    assert run_date(config(checkpoint={"resume": path, "weights_only": True})) == TODAY
    assert run_date(config(run={**run, "name": "two"}, checkpoint={"resume": "auto"})) == TODAY
    (tmp_path / "one" / FILE).write_text("yesterday")
    with pytest.raises(UserError, match=r"sft_date.txt holds no date; remove it"):
        run_date(config(**auto))


def test_a_date_that_cannot_be_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_date(tmp_path / "nowhere", "2026-03-09")
    assert "cannot be written (No such file or directory)" in capsys.readouterr().out


def test_the_next_days_run_goes_on_with_the_rows_of_the_first_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES)
    settings = attrs.asdict(making.section(tmp_path, file, template=making.DATED))
    run = {"run": {"dir": str(tmp_path / "runs"), "name": "one"}, "sft": settings, "data": {"seq_len": 64}}
    monkeypatch.setattr("femto_sft.run_date.day_of", lambda section: section.date or datetime.date(2026, 3, 9))
    plugin = SupervisedFineTuning()
    first = plugin.femto_dataset(config(**run), "train")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    trainer: Any = SimpleNamespace(mesh=SimpleNamespace(rank=0), run_dir=tmp_path / "runs" / "one")
    plugin.femto_train_begin(trainer)
    monkeypatch.setattr("femto_sft.run_date.day_of", lambda section: section.date or datetime.date(2026, 3, 10))
    resumed = config(**run, checkpoint={"resume": "auto"})
    assert SupervisedFineTuning().femto_dataset(resumed, "train").fingerprint == first.fingerprint
    assert SupervisedFineTuning().femto_dataset(config(**run), "train").fingerprint != first.fingerprint
