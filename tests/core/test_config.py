"""Settings from defaults, a TOML file and flags: which one wins, and every refusal by its words."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from femto_core.build import fill_batch
from femto_core.cli import run_command
from femto_core.commands import Command
from femto_core.config import Config, config_class, make_config, setting_kinds
from femto_core.errors import UserError
from femto_core.flags import read_flags
from femto_core.hookspecs import hookimpl
from femto_core.plugins import activate
from femto_core.sections import OptimSection, TrainSection, positive
from femto_core.toml_file import read_toml
from femto_ops.paths import is_folder_name


@attrs.frozen(kw_only=True)
class Zap:
    """A plugin's section."""

    size: int = attrs.field(default=1, validator=positive)
    """How many."""
    shift: int = 0
    """Where, below zero too."""
    weights: tuple[float, ...] = ()
    """How much of each."""
    stage: Literal[1, 2] = 1
    """Which."""
    limit: int | None = None
    """At most; none: no limit."""
    names: tuple[str, ...] = ("a", "b", "c")
    """What they are called."""


@attrs.frozen
class NoOptions:
    """Train."""


TRAIN = Command("train", "", NoOptions, lambda options: 0, takes_run=True)
FULL = config_class({"zap": Zap})


def read(folder: Path, toml: str = "", *flags: str, cls: type[Config] = FULL) -> Config:
    """The config of a run started as `femto train RUN.toml FLAGS`."""
    path = folder / "run.toml"
    path.write_text(toml, encoding="utf-8")
    return make_config(cls, read_toml(path), read_flags(TRAIN, flags, setting_kinds(cls)), str(path))


def refusal(folder: Path, toml: str = "", *flags: str, cls: type[Config] = FULL) -> str:
    """The sentence with which the config is refused, the file's name in it written FILE."""
    with pytest.raises(UserError) as caught:
        read(folder, toml, *flags, cls=cls)
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text.replace(str(folder / "run.toml"), "FILE")


def setting(config: Config, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def test_a_flag_wins_over_the_file_and_the_file_over_the_default_key_by_key(tmp_path: Path) -> None:
    toml = "[train]\nsteps = 7\nseed = 8\n[data]\nseq_len = 9"
    config = read(tmp_path, toml, "--train.seed", "10", "--optim.lr", "0.5")
    assert config.train == TrainSection(steps=7, seed=10)
    assert config.data.seq_len == 9
    assert config.optim == OptimSection(lr=0.5, warmup=0)


def test_a_flag_that_repeats_the_default_still_wins_over_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, "[train]\nseed = 8\n[data]\nshuffle = false", "--train.seed=0", "--data.shuffle") == FULL()


def test_the_last_of_two_equal_flags_wins(tmp_path: Path) -> None:
    assert read(tmp_path, "", "--train.seed", "1", "--train.seed", "2").train.seed == 2


def test_lists_are_replaced_and_not_joined(tmp_path: Path) -> None:
    toml = "[zap]\nnames = ['a', 'b']"
    assert read(tmp_path, toml).section(Zap).names == ("a", "b")
    assert read(tmp_path, toml, "--zap.names", "c").section(Zap).names == ("c",)


def test_a_config_cannot_be_changed_after_it_was_checked(tmp_path: Path) -> None:
    config = read(tmp_path)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.train.steps = 3  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.train = TrainSection()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--train.steps 7", "train.steps", 7),
        ("--train.steps=7", "train.steps", 7),
        ("--train.steps 1_000", "train.steps", 1000),
        ("--train.stop-after 7", "train.stop_after", 7),
        ("--train.stop_after 7", "train.stop_after", 7),
        ("--optim.lr 1", "optim.lr", 1.0),
        ("--optim.lr=1e-4", "optim.lr", 1e-4),
        ("--train.compile", "train.compile", True),
        ("--train.compile true", "train.compile", True),
        ("--train.compile=True", "train.compile", True),
        ("--train.compile --train.seed 1", "train.compile", True),
        ("--data.no-shuffle", "data.shuffle", False),
        ("--data.no-shuffle --train.seed 1", "data.shuffle", False),
        ("--data.shuffle false", "data.shuffle", False),
        ("--data.shuffle=FALSE", "data.shuffle", False),
        ("--run.name 5", "run.name", "5"),
        ("--run.name true", "run.name", "true"),
        ("--run.name -x", "run.name", "-x"),
        ("--run.name=--x", "run.name", "--x"),
        ("--run.name=a=b", "run.name", "a=b"),
        ("--run.name=", "run.name", ""),
        ("--model.family qwen3", "model.family", "qwen3"),
        ("--optim.betas 0.8 1e-1", "optim.betas", (0.8, 0.1)),
        ("--zap.names", "zap.names", ()),
        ("--zap.names 1 true", "zap.names", ("1", "true")),
        ("--zap.names=a", "zap.names", ("a",)),
        ("--zap.shift -3", "zap.shift", -3),
        ("--zap.shift=-3", "zap.shift", -3),
        ("--zap.weights -1 -2.5e-1 --zap.size 2", "zap.weights", (-1.0, -0.25)),
        ("--zap.stage 2", "zap.stage", 2),
        ("--zap.limit 2", "zap.limit", 2),
    ],
)
def test_a_flag_gives_its_setting_exactly_this_value_and_type(
    flags: str, name: str, value: object, tmp_path: Path
) -> None:
    found = setting(read(tmp_path, "", *flags.split(" ")), name)
    assert found == value
    assert type(found) is type(value)
    if isinstance(found, tuple) and isinstance(value, tuple):
        assert [type(item) for item in found] == [type(item) for item in value]


@pytest.mark.parametrize(
    ("toml", "name", "value"),
    [
        ("[optim]\nlr = 1", "optim.lr", 1.0),
        ("optim.lr = 2.0", "optim.lr", 2.0),
        ("optim = {lr = 2.0}", "optim.lr", 2.0),
        ("[run]\nname = ''", "run.name", ""),
        ("[data]\nshuffle = false", "data.shuffle", False),
        ("[zap]\nnames = []", "zap.names", ()),
        ("[optim]\nbetas = [0, 0.5]", "optim.betas", (0.0, 0.5)),
        ("[zap]\nstage = 2", "zap.stage", 2),
        ("[zap]\nshift = -2", "zap.shift", -2),
    ],
)
def test_a_line_of_the_file_gives_its_setting_exactly_this_value_and_type(
    toml: str, name: str, value: object, tmp_path: Path
) -> None:
    found = setting(read(tmp_path, toml), name)
    assert found == value
    assert type(found) is type(value)


FAMILIES = "must be one of llama, mistral, qwen2, qwen3; did you mean 'llama'?"
ALL = "(femto train --help lists all)"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        # unknown
        ("[data]\nseqlen = 3", "unknown key data.seqlen (FILE, line 2); did you mean 'seq_len'?"),
        ("[data]\nseq-len = 3", "unknown key data.seq-len (FILE, line 2); did you mean 'seq_len'?"),
        ("[data]\n\n# seqlen\n  seqlen=3", "unknown key data.seqlen (FILE, line 4); did you mean 'seq_len'?"),
        ("[data]\nqqq = 3", "unknown key data.qqq (FILE, line 2)"),
        ("data.seqlen = 3", "unknown key data.seqlen (FILE, line 1); did you mean 'seq_len'?"),
        ("[train]\nseed = 1\n[data]\nseed = 1", "unknown key data.seed (FILE, line 4)"),
        ("[zap]\nsiz = 1", "unknown key zap.siz (FILE, line 2); did you mean 'size'?"),
        ("[dat]\nseq_len = 3", "unknown section [dat] (FILE, line 1); did you mean 'data'?"),
        ("[tp]\nsize = 3", "unknown section [tp] (FILE, line 1); is its plugin active? (--plugins)"),
        ("[run]\n[tp]\n", "unknown section [tp] (FILE, line 2); is its plugin active? (--plugins)"),
        # wrong types: nothing is rounded, parsed or guessed
        ("[data]\nseq_len = 3.7", "data.seq_len = 3.7 (FILE, line 2): must be a whole number"),
        ("[data]\nseq_len = 3.0", "data.seq_len = 3.0 (FILE, line 2): must be a whole number"),
        ("[data]\nseq_len = true", "data.seq_len = True (FILE, line 2): must be a whole number"),
        ("[data]\nseq_len = '3'", "data.seq_len = '3' (FILE, line 2): must be a whole number"),
        ("[data]\nseq_len = [3]", "data.seq_len = [3] (FILE, line 2): must be a whole number"),
        ("[data.seq_len]\nx = 3", "data.seq_len = {'x': 3} (FILE, line 1): must be a whole number"),
        ("[optim]\nlr = true", "optim.lr = True (FILE, line 2): must be a number"),
        ("[optim]\nlr = '1'", "optim.lr = '1' (FILE, line 2): must be a number"),
        ("[optim]\nlr = inf", "optim.lr = inf (FILE, line 2): must be a finite number"),
        ("[optim]\nclip = nan", "optim.clip = nan (FILE, line 2): must be a finite number"),
        ("[data]\nshuffle = 1", "data.shuffle = 1 (FILE, line 2): must be true or false"),
        ("[data]\nshuffle = 'true'", "data.shuffle = 'true' (FILE, line 2): must be true or false"),
        ("[run]\nname = 5", "run.name = 5 (FILE, line 2): must be text"),
        ("[run]\nname = true", "run.name = True (FILE, line 2): must be text"),
        ("[zap]\nnames = 'def '", "zap.names = 'def ' (FILE, line 2): must be a list"),
        ("[zap]\nnames = ['a', 1]", "zap.names = ['a', 1] (FILE, line 2): must be text"),
        ("[optim]\nbetas = 0.9", "optim.betas = 0.9 (FILE, line 2): must be a list"),
        ("[optim]\nbetas = [0.9]", "optim.betas = [0.9] (FILE, line 2): must be 2 values"),
        ("[optim]\nbetas = [1, 1, 1]", "optim.betas = [1, 1, 1] (FILE, line 2): must be 2 values"),
        ("[optim]\nbetas = [1, true]", "optim.betas = [1, True] (FILE, line 2): must be a number"),
        ("[zap]\nlimit = 'x'", "zap.limit = 'x' (FILE, line 2): must be a whole number"),
        ("plugins = 'zap'", "plugins = 'zap' (FILE, line 1): must be a list"),
        ("data = 3", "[data] must be a section (FILE, line 1)"),
        ("[[data]]\nseq_len = 3", "[data] must be a section (FILE, line 1)"),
        # choices
        ("[model]\nfamily = 'lama'", f"model.family = 'lama' (FILE, line 2): {FAMILIES}"),
        (
            "[model]\nfamily = 'LLAMA'",
            "model.family = 'LLAMA' (FILE, line 2): must be one of llama, mistral, qwen2, qwen3",
        ),
        ("[zap]\nstage = 3", "zap.stage = 3 (FILE, line 2): must be one of 1, 2"),
        ("[zap]\nstage = true", "zap.stage = True (FILE, line 2): must be one of 1, 2"),
        ("[zap]\nstage = 1.0", "zap.stage = 1.0 (FILE, line 2): must be one of 1, 2"),
        # out of range
        ("[train]\nsteps = 0", "train.steps = 0 (FILE, line 2): must be greater than 0"),
        ("[train]\nseed = -1", "train.seed = -1 (FILE, line 2): must lie in [0, 2^62)"),
        ("[optim]\nmin_ratio = 1", "optim.min_ratio = 1 (FILE, line 2): must lie in [0, 1)"),
        ("[zap]\nsize = 0", "zap.size = 0 (FILE, line 2): must be greater than 0"),
    ],
)
def test_a_wrong_line_of_the_file_is_refused_with_its_place_and_what_to_write(
    toml: str, words: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, toml) == words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # unknown
        ("--train.step 3", f"unknown flag --train.step; did you mean '--train.steps'? {ALL}"),
        ("--train.stop-afte=3", f"unknown flag --train.stop-afte; did you mean '--train.stop-after'? {ALL}"),
        ("--tp.size 3", f"unknown flag --tp.size; is its plugin active? (--plugins) {ALL}"),
        ("--zap.qqqqqqqqqq 3", f"unknown flag --zap.qqqqqqqqqq {ALL}"),
        ("--steps 3", f"unknown flag --steps; did you mean '--train.steps'? {ALL}"),
        ("--data 3", f"unknown flag --data; did you mean '--data.path'? {ALL}"),
        ("-- 3", f"unknown flag -- {ALL}"),
        ("train.steps 3", "unexpected argument 'train.steps'; settings are written --section.key value"),
        ("-train.steps 3", "unexpected argument '-train.steps'; settings are written --section.key value"),
        ("--train.steps 3 4", "unexpected argument '4'; settings are written --section.key value"),
        # missing and empty
        ("--train.steps", "--train.steps needs a value"),
        ("--train.steps --train.seed 1", "--train.steps needs a value"),
        ("--train.steps=", "train.steps = '' (on the command line): must be a whole number"),
        ("--train.steps ", "train.steps = '' (on the command line): must be a whole number"),
        ("--optim.lr=", "optim.lr = '' (on the command line): must be a number"),
        ("--train.compile=", "train.compile = '' (on the command line): must be true or false"),
        ("--model.weights=", "model.weights = '' (on the command line): must be one of load, random"),
        ("--optim.betas", "optim.betas = [] (on the command line): must be 2 values"),
        # wrong types
        ("--train.steps 3.7", "train.steps = '3.7' (on the command line): must be a whole number"),
        ("--train.steps 1e3", "train.steps = '1e3' (on the command line): must be a whole number"),
        ("--train.steps 1__0", "train.steps = '1__0' (on the command line): must be a whole number"),
        ("--train.steps true", "train.steps = 'true' (on the command line): must be a whole number"),
        ("--optim.lr fast", "optim.lr = 'fast' (on the command line): must be a number"),
        ("--optim.lr nan", "optim.lr = 'nan' (on the command line): must be a finite number"),
        ("--data.shuffle=1", "data.shuffle = '1' (on the command line): must be true or false"),
        ("--data.shuffle 1", "unexpected argument '1'; settings are written --section.key value"),
        ("--data.no-shuffle=true", f"unknown flag --data.no-shuffle; did you mean '--data.shuffle'? {ALL}"),
        ("--train.no-steps", f"unknown flag --train.no-steps; did you mean '--train.steps'? {ALL}"),
        ("--optim.betas 0.9", "optim.betas = ['0.9'] (on the command line): must be 2 values"),
        ("--optim.betas 0.9 x", "optim.betas = ['0.9', 'x'] (on the command line): must be a number"),
        # choices and ranges
        ("--model.family lama", f"model.family = 'lama' (on the command line): {FAMILIES}"),
        ("--zap.stage 3", "zap.stage = '3' (on the command line): must be one of 1, 2"),
        ("--train.seed -1", "train.seed = '-1' (on the command line): must lie in [0, 2^62)"),
        ("--train.steps=-3", "train.steps = '-3' (on the command line): must be greater than 0"),
    ],
)
def test_a_wrong_flag_is_refused_with_what_was_typed_and_what_to_type(flags: str, words: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, "[train]\nsteps = 5", *flags.split(" ")) == words


def test_a_wrong_value_is_blamed_on_the_flag_only_where_the_flag_gave_it(tmp_path: Path) -> None:
    toml = "[train]\nsteps = 0\n[data]\nseq_len = 1"
    assert refusal(tmp_path, toml, "--train.seed", "1") == "train.steps = 0 (FILE, line 2): must be greater than 0"
    assert read(tmp_path, toml, "--train.steps", "1").train.steps == 1


@pytest.mark.parametrize(
    "toml", ["x = \n", "[data\nseq_len = 1\n", "[data]\nseq_len = 1\nseq_len = 2\n", "[data]\n[data]\n", "= 1\n"]
)
def test_malformed_toml_is_refused_with_file_and_line(toml: str, tmp_path: Path) -> None:
    words = refusal(tmp_path, "# a comment\n" + toml + "# another\n")
    assert words.startswith("config file FILE cannot be read: ")
    assert "(at line " in words


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"^config file .*run\.toml cannot be read: "):
        read_toml(path)
    with pytest.raises(UserError, match=r"^config file .* cannot be read: .*Is a directory"):
        read_toml(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_toml(tmp_path / "none.toml")
    assert str(caught.value) == f"config file {tmp_path / 'none.toml'} does not exist"


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 2.5")
    command = [sys.executable, "-m", "femto_core", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"femto: train.steps = 2.5 ({path}, line 2): must be a whole number\n"
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[train]\nsteps = 3\nstop_after = 4", "train.stop_after = 4 lies beyond train.steps = 3"),
        ("[train]\nsteps = 20\n[optim]\nwarmup = 20", "optim.warmup = 20 must be less than train.steps = 20"),
        ("[optim]\ndecay = 9", "optim.decay = 9 is for --optim.schedule wsd only"),
        (
            "[train]\nsteps = 10\n[optim]\ndecay = 8\nwarmup = 3\nschedule = 'wsd'",
            "optim.decay = 8 must fit between optim.warmup and train.steps = 10",
        ),
        ("[optim]\nlr = 1e38", r"optim.lr = 1e\+38 .*: must lie in \(0, 1e6\]"),
        ("[optim]\nbetas = [0.9, 1.0]", r"optim.betas = \(0.9, 1.0\) must lie in \[0, 1\)"),
        ("[model]\nattention = 'flash_attention_2'", "model.attention = .* .* --data.micro-batch 1 only"),
        ("plugins = 'tensorboard'", "plugins = 'tensorboard' .*: must be a list of names"),
        ("plugins = [1]", r"plugins = \[1\] .*: must be a list of names"),
    ],
)
def test_combinations_that_cannot_be_meant_are_refused_before_anything_starts(
    toml: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    with pytest.raises(UserError, match=f"^{words}$"):
        run_command(["train", str(path)])


def test_a_plugin_reads_its_own_section_by_its_class(tmp_path: Path) -> None:
    config = read(tmp_path, "[zap]\nsize = 2", "--zap.shift", "-1")
    assert config.section(Zap) == Zap(size=2, shift=-1)
    assert config.section(TrainSection) is config.train
    with pytest.raises(LookupError, match="no active plugin registered a config section of type Zap"):
        read(tmp_path, "", cls=config_class({})).section(Zap)


def test_a_plugins_defaults_win_over_the_sections_and_lose_to_all_else(tmp_path: Path) -> None:
    defaults = ({"optim": {"lr": 1.0, "clip": 1.0}, "data": {"seq_len": 7}}, {"optim": {"lr": 2.0, "eps": 2.0}})
    made = make_config(Config, {"optim": {"clip": 3.0}}, {"data": {"seq_len": 9}}, "", defaults)
    assert (made.optim.lr, made.optim.eps, made.optim.clip, made.data.seq_len) == (2.0, 2.0, 3.0, 9)
    assert made.optim.weight_decay == OptimSection().weight_decay


class Careful:
    """A plugin with defaults of its own."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    @hookimpl
    def femto_config_defaults(self) -> dict[str, dict[str, Any]]:
        return {"optim": {"lr": self.lr}}


def install(monkeypatch: pytest.MonkeyPatch, **objects: object) -> None:
    """Have every run use the plugins `objects`."""
    monkeypatch.setattr("femto_core.cli.activate", functools.partial(activate, objects=objects))


def test_of_two_plugins_defaults_those_of_the_later_win(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, one=Careful(1.0), other=Careful(2.0))
    seen: list[Config] = []

    def train(words: object, options: object, config: Config, plugins: object) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("femto_core.cli.train", train)
    assert run_command(["--optim.warmup", "3"]) == 0
    assert run_command(["--optim.lr", "5"]) == 0
    assert [(config.optim.lr, config.optim.warmup) for config in seen] == [(2.0, 3), (5.0, 20)]


def test_help_shows_a_plugins_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, one=Careful(0.125))
    assert run_command(["train", "--help"]) == 0
    assert "0.125" in capsys.readouterr().out


def test_without_its_plugin_the_section_is_refused_in_file_and_flags(tmp_path: Path) -> None:
    plain = config_class({})
    assert refusal(tmp_path, "[zap]\nsize = 2", cls=plain).startswith("unknown section [zap] (FILE, line 1)")
    assert refusal(tmp_path, "", "--zap.size", "2", cls=plain).startswith("unknown flag --zap.size")


@attrs.frozen(kw_only=True)
class Demanding:
    size: int


class Plain:
    size: int = 3


@pytest.mark.parametrize(
    ("name", "cls", "words"),
    [
        ("train", Zap, f"config section [train] of {__name__} is one of femto's own; rename it"),
        ("plugins", Zap, f"config section [plugins] of {__name__} is one of femto's own; rename it"),
        ("section", Zap, f"config section [section] of {__name__} is one of femto's own; rename it"),
        ("to_dict", Zap, f"config section [to_dict] of {__name__} is one of femto's own; rename it"),
        ("my-zap", Zap, f"config section [my-zap] of {__name__} is no Python name; rename it"),
        ("zap", Demanding, "config section [zap]: Demanding must be an attrs class, each field with a default"),
        ("zap", Plain, "config section [zap]: Plain must be an attrs class, each field with a default"),
    ],
)
def test_a_section_that_cannot_work_is_refused_by_name(name: str, cls: type[Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        config_class({name: cls})
    assert str(caught.value) == words


def test_help_lists_every_flag_that_the_reader_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FEMTO_PLUGINS", raising=False)
    assert run_command(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    flags = ["--" + name.replace("_", "-") for name in setting_kinds(config_class({}))]
    assert len(flags) > 40
    assert [flag for flag in flags if f"{flag} " not in shown and f"{flag}," not in shown] == []


def round_trip(config: Config, path: Path) -> Config:
    path.write_text(tomli_w.dumps(config.to_dict()), encoding="utf-8")
    return make_config(type(config), read_toml(path), {}, str(path))


def test_the_written_config_spells_out_every_default_and_reads_back_equal(tmp_path: Path) -> None:
    config = FULL()
    assert round_trip(config, tmp_path / "config.toml") == config
    sections: dict[str, Any] = {f.name: getattr(config, f.name) for f in attrs.fields(FULL) if f.name != "plugins"}
    written = read_toml(tmp_path / "config.toml")
    for name, section in sections.items():
        assert set(written[name]) == {f.name for f in attrs.fields(type(section))} - {"limit"}, name


texts = st.text(st.characters(exclude_categories=["Cs"]))
floats = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=texts.filter(is_folder_name),
    names=st.lists(texts).map(tuple),
    plugins=st.lists(texts).map(tuple),
    lr=st.floats(min_value=0, max_value=1e6, exclude_min=True),
    seed=st.integers(min_value=0, max_value=2**62 - 1),
    shift=st.integers(min_value=-(2**63), max_value=-1),
    weights=st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
    shuffle=st.booleans(),
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    limit=st.none() | st.integers(min_value=0, max_value=9),
)
def test_any_config_reads_back_equal_from_its_file(
    tmp_path: Path,
    name: str,
    names: tuple[str, ...],
    plugins: tuple[str, ...],
    lr: float,
    seed: int,
    shift: int,
    weights: tuple[float, ...],
    shuffle: bool,
    family: str,
    limit: int | None,
) -> None:
    tree = {
        "plugins": plugins,
        "run": {"name": name},
        "optim": {"lr": lr},
        "train": {"seed": seed},
        "data": {"shuffle": shuffle},
        "model": {"family": family},
        "zap": {"shift": shift, "names": names, "weights": weights, **({} if limit is None else {"limit": limit})},
    }
    config = make_config(FULL, tree, {})
    assert config.section(Zap) == Zap(shift=shift, weights=weights, limit=limit, names=names)
    assert round_trip(config, tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("asked", "section", "expected"),
    [
        ({"train": {"steps": 8}}, "optim", {"warmup": 0}),
        ({"train": {"steps": 100}}, "optim", {"warmup": 10}),
        ({}, "optim", {"warmup": 20}),
        ({"train": {"steps": 8}}, "eval", {"every": 2}),
        ({"train": {"steps": 1}}, "eval", {"every": 1}),
        ({"train": {"steps": 8}, "eval": {"every": 100}}, "eval", {"every": 100}),
        ({"model": {"heads": 3}}, "model", {"hidden_size": 132, "heads": 3, "kv_heads": 1}),
        ({"model": {"heads": 9}}, "model", {"hidden_size": 144, "kv_heads": 1}),
        ({"model": {"hidden_size": 100}}, "model", {"heads": 2, "kv_heads": 2}),
        ({"model": {"hidden_size": 2}}, "model", {"heads": 1, "kv_heads": 1}),
        ({"model": {"heads": 8, "kv_heads": 8}}, "model", {"hidden_size": 128, "kv_heads": 8}),
    ],
)
def test_defaults_that_depend_on_others_follow_them(
    asked: dict[str, Any], section: str, expected: dict[str, int]
) -> None:
    values = getattr(make_config(Config, asked, {}), section)
    assert {name: getattr(values, name) for name in expected} == expected


def test_a_plugins_default_follows_too_and_a_flag_does_not() -> None:
    assert make_config(Config, {"train": {"steps": 50}}, {}, "", [{"optim": {"warmup": 30}}]).optim.warmup == 5
    assert make_config(Config, {"train": {"steps": 50}}, {"optim": {"warmup": 30}}).optim.warmup == 30


@pytest.mark.parametrize(("ranks", "micro_batch", "rows"), [(1, 0, 16), (3, 0, 18), (2, 3, 18), (4, 8, 32), (2, 8, 16)])
def test_the_default_batch_fits_the_ranks(ranks: int, micro_batch: int, rows: int) -> None:
    data = fill_batch(make_config(Config, {"data": {"micro_batch": micro_batch}}, {}), ranks).data
    assert data.global_batch == rows
    assert rows % (ranks * data.micro_batch) == 0


def test_a_path_below_home_is_expanded_from_file_and_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = read(tmp_path, '[run]\ndir = "~/runs"\n[data]\npath = "~/data"', "--model.path=~/model")
    assert (config.run.dir, config.data.path, config.model.path) == (
        "/home/someone/runs",
        "/home/someone/data",
        "/home/someone/model",
    )
