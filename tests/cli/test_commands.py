"""Every command reads its words alike: one form of help, one sentence for each mistake, exit code 2."""

from __future__ import annotations

from importlib import metadata
from typing import Any, Literal

import attrs
import pytest

from femto_core.cli import main, run_command
from femto_core.commands import Command
from femto_core.errors import UserError
from femto_core.flags import make_options, read_flags
from femto_core.sections import positive
from femto_tools.helptext import command_help, sentences

PLUGINS = ("--plugins", "sft,pp")
COMMANDS = {
    "train": (),
    "plugins": (),
    "hooks": (),
    "memory": (),
    "verify": (),
    "export": ("CHECKPOINT",),
    "checkpoint": ("ACTION", "CHECKPOINT"),
    "preprocess": (),
    "data-inspect": ("DIRECTORY",),
    "sft-inspect": (),
    "pp-draw": (),
}
"""Every command, and what it takes without a flag."""
TAKE_RUN = ("train", "memory", "verify", "sft-inspect")


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as refused:
        run_command(words)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_table_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help", *PLUGINS]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in shown if line.startswith("  femto ")} == set(COMMANDS)


@pytest.mark.parametrize("word", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_one_form(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, *PLUGINS, word]) == 0
    lines = capsys.readouterr().out.splitlines()
    usage = " ".join(["usage: femto", command, *COMMANDS[command]])
    assert lines[0] == usage or lines[0].startswith(f"{usage} [")
    assert ("[RUN.toml] [--plugins NAMES] [--section.key value ...]" in lines[0]) is (command in TAKE_RUN)
    assert lines[1] == ""
    assert len(lines[2].split()) > 3
    assert [line for line in lines if line.startswith(("  --", "  [A-Z]")) and len(line) > 120] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_its_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, *PLUGINS, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("  --")]
    for number in heads:
        text = lines[number][32:].strip() or lines[number + 1].strip()
        assert text, lines[number]
        assert not text.startswith("(default"), lines[number]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_refused(command: str) -> None:
    given = [word.lower() for word in COMMANDS[command]]
    assert refusal(command, *given, *PLUGINS, "--qqqqqqq", "1") == (
        f"unknown flag --qqqqqqq (femto {command} --help lists all)"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_one_word_too_many_is_refused(command: str) -> None:
    given = [word.lower() for word in COMMANDS[command]]
    advice = "; settings are written --section.key value" if command in TAKE_RUN else ""
    words = ["none.toml"] if command == "train" else ["many"]
    if command == "train":
        assert refusal(command, *words) == "config file none.toml does not exist"
        return
    assert refusal(command, *given, *words, *PLUGINS) == (
        f"unexpected argument 'many'{advice or f' (femto {command} --help lists all)'}"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # a flag without its value
        ("verify --nproc", "--nproc needs a value"),
        ("verify --nproc --steps 1", "--nproc needs a value"),
        ("export x --output", "--output needs a value"),
        ("pp-draw --schedule --size 2", "--schedule needs a value"),
        # what is required
        ("export --output x", "femto export needs CHECKPOINT (femto export --help lists all)"),
        ("export x", "femto export needs --output (femto export --help lists all)"),
        ("checkpoint", "femto checkpoint needs ACTION (femto checkpoint --help lists all)"),
        ("checkpoint inspect", "femto checkpoint needs CHECKPOINT (femto checkpoint --help lists all)"),
        ("data-inspect", "femto data-inspect needs DIRECTORY (femto data-inspect --help lists all)"),
        ("preprocess --input a", "femto preprocess needs --seq-len (femto preprocess --help lists all)"),
        ("preprocess", "femto preprocess needs --input (femto preprocess --help lists all)"),
        # wrong types and values
        ("export x --output y --shard-gib a", "--shard-gib = 'a' (on the command line): must be a number"),
        ("export x --output y --shard-gib 0", "--shard-gib = '0' (on the command line): must be greater than 0"),
        (
            "export x --output y --dtype float23",
            (
                "--dtype = 'float23' (on the command line): must be one of float32, bfloat16, float16; "
                "did you mean 'float32'?"
            ),
        ),
        ("checkpoint show x", "ACTION = 'show' (on the command line): must be one of inspect"),
        ("verify --nproc 1.5", "--nproc = '1.5' (on the command line): must be a whole number"),
        ("verify --nproc=", "--nproc = '' (on the command line): must be a whole number"),
        ("verify --hidden -2", "--hidden = '-2' (on the command line): must not be negative"),
        ("memory --ranks 0", "--ranks = '0' (on the command line): must be greater than 0"),
        ("data-inspect d --rows 0 x", "--rows = ['0', 'x'] (on the command line): must be a whole number"),
        ("data-inspect d --check=1", "--check = '1' (on the command line): must be true or false"),
        (
            "preprocess --input a --seq-len 4 --output b --weights 0.7 much",
            "--weights = ['0.7', 'much'] (on the command line): must be a number",
        ),
        ("sft-inspect --show 0,3", "--show = ['0,3'] (on the command line): must be a whole number"),
        ("sft-inspect --show", "--show = [] (on the command line): must be one or more numbers from 0"),
        # near misses
        ("verify --nprocs 2", "unknown flag --nprocs; did you mean '--nproc'? (femto verify --help lists all)"),
        (
            "verify --train.step 2",
            "unknown flag --train.step; did you mean '--train.steps'? (femto train --help lists all)",
        ),
        (
            "verify --tp.size 2",
            "unknown flag --tp.size; is its plugin active? (--plugins) (femto train --help lists all)",
        ),
        ("export x --zap.key 2", "unknown flag --zap.key (femto export --help lists all)"),
        ("export --checkpoint x", "unknown flag --checkpoint (femto export --help lists all)"),
        ("export x --no-output", "unknown flag --no-output; did you mean '--output'? (femto export --help lists all)"),
        ("plugins --no-json=true", "unknown flag --no-json; did you mean '--json'? (femto plugins --help lists all)"),
        ("export -x", "unexpected argument '-x' (femto export --help lists all)"),
        ("hooks --", "unknown flag -- (femto hooks --help lists all)"),
        ("memory --plugins", "--plugins needs names, separated by commas"),
    ],
)  # fmt: skip
def test_each_mistake_gets_its_sentence(words: str, said: str) -> None:
    plugins = () if words.endswith("--plugins") else PLUGINS
    assert refusal(*words.split(" "), *plugins) == said


@pytest.mark.parametrize("command", ["export", "pp-draw", "verify", "sft-inspect"])
def test_a_mistake_is_one_line_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, *PLUGINS, "--qqqqqqq"])
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"femto: unknown flag --qqqqqqq (femto {command} --help lists all)\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"femto-core {metadata.version('femto-core')}\n"


def test_plugins_may_be_named_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--plugins=pp", "pp-draw", "--size", "1"]) == 0
    assert capsys.readouterr().out.startswith("rank 0")


# The reader alone


@attrs.frozen(kw_only=True)
class Base:
    width: int = attrs.field(default=1, validator=positive)
    """How wide,
    over two lines."""


@attrs.frozen(kw_only=True)
class Options(Base):
    """Do it."""

    place: str = attrs.field(metadata={"positional": True})
    """Where."""
    shares: tuple[float, ...] = ()
    pair: tuple[int, int] = (1, 2)
    kind: Literal["a", "b"] = "a"
    dry_run: bool = True
    """Only look."""


OPTIONS = Command("do", "do it", Options, lambda options: 0, takes_run=False)


def read(*words: str) -> Any:
    return make_options(OPTIONS, read_flags(OPTIONS, words, {}).get("", {}))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("here", {}),
        ("here --width 3", {"width": 3}),
        ("--width=3 here", {"width": 3}),
        ("here --shares 0.7 0.3", {"shares": (0.7, 0.3)}),
        ("--shares 0.7 0.3 --width 2 here", {"shares": (0.7, 0.3), "width": 2}),
        ("here --shares=1", {"shares": (1.0,)}),
        ("here --shares -1 --pair 3 4", {"shares": (-1.0,), "pair": (3, 4)}),
        ("--no-dry-run here", {"dry_run": False}),
        ("--dry-run here", {}),
        ("here --dry-run false", {"dry_run": False}),
        ("here --dry_run=False", {"dry_run": False}),
        ("here --kind b --kind a", {}),
    ],
)
def test_options_are_read_with_their_types(words: str, values: dict[str, Any]) -> None:
    assert read(*words.split()) == Options(place="here", **values)


def test_a_positional_may_hold_anything_but_a_flag() -> None:
    assert read("a=b c").place == "a=b c"
    assert read("").place == ""


def test_help_shows_inherited_options_types_defaults_and_what_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert command_help(OPTIONS, None).splitlines() == [
        "usage: femto do PLACE [--option value ...]",
        "",
        "Do it.",
        "",
        "  PLACE                         Where. (required)",
        "  --width INT                   How wide, over two lines. (default: 1)",
        "  --shares FLOAT ...",
        "  --pair INT INT                (default: 1 2)",
        "  --kind a|b                    (default: a)",
        "  --dry-run, --no-dry-run       Only look. (default: true)",
    ]


def test_a_class_without_source_has_help_without_sentences() -> None:
    made = attrs.make_class("Made", {"x": attrs.field(type=int, default=3)})
    made.__annotations__ = {"x": int}
    made.__module__ = "nowhere"
    assert sentences(made) == {}
    assert "--x INT" in command_help(Command("made", "", made, lambda options: 0, takes_run=False), None)
