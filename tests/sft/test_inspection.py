"""`femto sft-inspect`: tokens, trained or not, and counts; settings that are refused."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from femto_core.cli import run_command
from femto_core.config import Config, config_class, make_config
from femto_core.errors import UserError
from femto_core.plugins import list_plugins
from femto_core.toml_file import read_toml
from femto_report.progress import LogSection
from femto_report.samples import SampleSection
from femto_sft.conversation import Problem
from femto_sft.inspection import TRAINED, UNTRAINED, conversations, show
from femto_sft.plugin import SupervisedFineTuning, advice
from femto_sft.section import SFTSection
from femto_sft.tokenizer import load_tokenizer
from tests.sft.making import encoded, make_tokenizer, said, save_tokenizer, section, write_lines

YES = said(("user", "say yes"), ("assistant", "yes"))


def words(tmp_path: Path, file: Path, *more: str) -> list[str]:
    tokenizer = tmp_path / "tokenizer"
    if not tokenizer.exists():
        save_tokenizer(tokenizer)
    paths = ["--sft.path", str(file), "--sft.tokenizer", str(tokenizer), "--sft.cache", str(tmp_path / "cache")]
    return ["--plugins", "sft", *paths, *more]


def test_trained_tokens_have_brackets_and_the_counts_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES, {"messages": []}, said(("user", "q" * 300), ("assistant", "yes")))
    assert run_command(["sft-inspect", *words(tmp_path, file, "--sft.held-out", "0", "--data.seq-len", "64")]) == 0
    out = capsys.readouterr().out
    assert "conversation 0: " in out
    assert "[yes][<|im_end|>]\\n|" in out
    assert "2 trained\n" in out
    assert "holds no turns" in out
    assert "over-long for rows of 64: drop, left out" in out
    assert "packing ffd: 1 rows of 64" in out
    assert "1 conversations left out: nothing in them to learn" in out


def test_every_token_is_shown_in_its_colour() -> None:
    tokenizer = make_tokenizer()
    tokens = encoded(tokenizer, YES)
    text = show(tokens, "title", tokenizer, 64, SFTSection())
    styles = [str(span.style) for span in text.spans]
    assert styles.count(TRAINED) == int(tokens.trained.sum())
    assert styles.count(UNTRAINED) == int((~tokens.trained).sum())
    console = Console(force_terminal=True, color_system="standard", file=io.StringIO())
    with console.capture() as shown:
        console.print(text)
    assert "\x1b[1;32m[yes]" in shown.get()


def test_what_no_terminal_shows_is_spelt_out() -> None:
    tokenizer = make_tokenizer()
    text = show(
        encoded(tokenizer, said(("user", "\x1b[31m\x07"), ("assistant", "a\tb"))), "t", tokenizer, 99, SFTSection()
    )
    assert "\x1b" not in text.plain
    assert "\x07" not in text.plain
    assert "\\t" in text.plain


def test_a_conversation_that_cannot_be_read_says_why() -> None:
    assert "is wrong" in show(Problem("is wrong"), "title", make_tokenizer(), 64, SFTSection()).plain


@pytest.mark.parametrize("numbers", ["", "one", "1;2", "-1", "0,3"])
def test_numbers_that_are_none_are_refused(tmp_path: Path, numbers: str) -> None:
    with pytest.raises(UserError, match=r"^--show = .* \(on the command line\): must be "):
        run_command(["sft-inspect", *words(tmp_path, tmp_path / "a.jsonl", "--show", *numbers.split())])


def test_a_conversation_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = section(tmp_path, write_lines(tmp_path / "a.jsonl", YES))
    tokenizer = load_tokenizer(settings.tokenizer, "", "")
    assert len(list(conversations(settings, tokenizer, 64, (0,)))) == 1
    with pytest.raises(UserError, match=r"there is no conversation 3: .* has 0 to 0"):
        list(conversations(settings, tokenizer, 64, (0, 3)))


def test_the_command_is_found_on_the_command_line(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES)
    more = words(tmp_path, file, "--show", "0", "--sft.held-out", "0")
    command = [sys.executable, "-m", "femto_core", "sft-inspect", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "[yes][<|im_end|>]" in done.stdout


def test_the_command_is_found_where_only_the_file_names_its_plugin(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES)
    (tmp_path / "run.toml").write_text('plugins = ["sft"]')
    more = words(tmp_path, file, "--show", "0", "--sft.held-out", "0")
    assert more[:2] == ["--plugins", "sft"]
    command = [sys.executable, "-m", "femto_core", "sft-inspect", str(tmp_path / "run.toml"), *more[2:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "[yes][<|im_end|>]" in done.stdout


# Settings.


def config(**sections: dict[str, Any]) -> Config:
    return make_config(config_class({"sft": SFTSection, "sample": SampleSection}), sections, {})


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({}, "plugin sft needs conversations"),
        ({"sft": {"path": ["a.jsonl"]}}, "plugin sft needs the model's tokenizer"),
        (
            {"sft": {"path": ["a.jsonl"]}, "model": {"path": "m"}, "data": {"path": "d"}},
            "data.path = 'd' has no effect",
        ),
    ],
)
def test_settings_that_cannot_do_are_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        SupervisedFineTuning().femto_validate(config(**sections))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": "csv"}, "must be one of auto, messages, conversations, instruction, prompt"),
        ({"packing": "fdd"}, "must be one of ffd, bfd, pad; did you mean 'ffd'"),
        ({"overlong": "cut"}, "must be one of drop, truncate, split"),
        ({"held_out": 1.0}, "must lie in"),
        ({"train_on": "user"}, "must be one of assistant, last, all"),
        ({"paths": ["a"]}, "unknown key sft.paths"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        config(sft=values)


def test_the_example_is_a_complete_set_of_settings() -> None:
    file = Path(__file__).parents[2] / "examples" / "sft_smollm2.toml"
    sections = {"sft": SFTSection, "sample": SampleSection, "log": LogSection}
    example = make_config(config_class(sections), read_toml(file), {}, str(file))
    SupervisedFineTuning().femto_validate(example)
    assert advice(example) == []
    assert example.section(SampleSection).prompts[0].startswith("<|im_start|>system\n")
    assert example.section(SampleSection).prompts[0].endswith("<|im_start|>assistant\n")


def test_the_plugin_takes_the_data_seats_and_nothing_else() -> None:
    [info] = [plugin for plugin in list_plugins([]) if plugin.name == "sft"]
    assert info.seats == ("femto_dataset", "femto_collator")
    assert set(info.hooks) == {
        "femto_config_section",
        "femto_config_defaults",
        "femto_commands",
        "femto_validate",
        "femto_transform_model",
        "femto_train_begin",
    }
