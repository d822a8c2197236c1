"""Plugins: how they are found, what is refused and in which words, and in which order their hooks are called.

Packages are installed here by writing what an installer leaves behind into a folder on sys.path: modules, and a
`.dist-info` directory with METADATA and entry_points.txt.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, distribution, entry_points
from pathlib import Path
from typing import Any, cast, get_args

import attrs
import pytest
from torch import nn

from femto_core import hookspecs
from femto_core import plugins as plugins_module
from femto_core.build import check_equal_everywhere
from femto_core.cli import run_command
from femto_core.commands import CommandRegistry
from femto_core.config import Config, config_class, make_config
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.hookspecs import hookimpl
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.plugins import BUILT_IN, activate, hook_names, hook_role, installed_plugins, is_seat, list_plugins

CORE = distribution("femto-core").version
HEAD = "from femto_core.hookspecs import hookimpl\nfrom femto_core.errors import UserError\n"
QUIET = tuple(f"no:{name}" for name in BUILT_IN)
OBSERVERS = ("no:sanity", "no:samples", "no:recorder", "no:progress", "no:logs", "no:profiler")


@attrs.frozen
class Site:
    """A folder of installed packages; of the others on this machine, only femto-core's plugins are seen beside it."""

    folder: Path
    distributions: list[str] = attrs.field(factory=list)

    def install(
        self,
        code: str,
        *,
        name: str = "zap",
        dist: str = "zap-dist",
        version: str = "1.0",
        value: str = "",
        requires: Sequence[str] = (),
        folder: str = "",
    ) -> Path:
        """Install `code` as the module NAME_module with the entry point `name`; return the module's file."""
        home = self.folder / folder
        metadata = home / f"{dist.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
        (metadata / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]))
        entries = metadata / "entry_points.txt"
        before = entries.read_text() if entries.exists() else "[femto.plugins]\n"
        entries.write_text(f"{before}{name} = {value or f'{name}_module'}\n")
        module = home / f"{name}_module.py"
        module.write_text(HEAD + textwrap.dedent(code))
        self.distributions.append(dist)
        importlib.invalidate_caches()
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path / "site")

    def seen(group: str) -> list[EntryPoint]:
        allowed = ["femto-core", *site.distributions]
        return [entry for entry in entry_points(group=group) if entry.dist is not None and entry.dist.name in allowed]

    monkeypatch.setattr(plugins_module, "entry_points", seen)
    monkeypatch.delenv("FEMTO_PLUGINS", raising=False)
    monkeypatch.delenv("FEMTO_TRACE_HOOKS", raising=False)
    monkeypatch.syspath_prepend(site.folder)
    yield site
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert not text.endswith(".")
    return text


def taking(seat: str, answer: str = "object()") -> str:
    return f"@hookimpl\ndef {seat}():\n    return {answer}\n"


# Finding


def test_installing_is_not_activating(site: Site) -> None:
    site.install("raise RuntimeError('imported')")
    assert [p.name for p in activate([]).active] == list(BUILT_IN)
    assert "zap_module" not in sys.modules


def test_an_active_plugin_is_known_by_the_name_and_version_of_its_package(site: Site) -> None:
    site.install(taking("femto_log"), version="2.1")
    active = activate(["zap"])
    assert active.versions == {"zap": "zap-dist 2.1"}
    assert active.active[-1].distribution == "zap-dist"


def test_naming_a_built_in_plugin_changes_nothing(site: Site) -> None:
    site.install(taking("femto_log"))
    assert [p.name for p in activate(["zap", "progress"]).active] == [*BUILT_IN, "zap"]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("@hookimpl\ndef femto_log(step): seen.append(step)", "zap_module"),
        ("class Zap:\n    @hookimpl\n    def femto_log(self, step): seen.append(step)", "zap_module:Zap"),
        ("class Zap:\n    @hookimpl\n    def femto_log(self, step): seen.append(step)\nzap = Zap()", "zap_module:zap"),
        ("class Zap:\n    @hookimpl\n    def femto_log(self, step): seen.append(step)\nmake = Zap", "zap_module:make"),
        (
            "class Zap:\n    @hookimpl\n    def femto_log(self, step): seen.append(step)\ndef make(): return Zap()",
            "zap_module:make",
        ),
        (
            "class Box:\n    class Zap:\n        @hookimpl\n        def femto_log(self, step): seen.append(step)",
            "zap_module:Box.Zap",
        ),
    ],
    ids=["module", "class", "object", "alias", "factory", "nested class"],
)
def test_an_entry_point_may_be_a_module_an_object_or_anything_that_makes_one(code: str, value: str, site: Site) -> None:
    site.install("seen = []\n" + code, value=value)
    call(Hooks(activate([*QUIET, "zap"]).manager), "femto_log", step=3)
    assert sys.modules["zap_module"].seen == [3]


def test_each_activation_makes_a_new_object_of_a_class(site: Site) -> None:
    site.install("made = []\nclass Zap:\n    def __init__(self): made.append(self)", value="zap_module:Zap")
    one, two = (activate(["zap"]).manager.get_plugin("zap") for _ in range(2))
    assert one is not two
    assert sys.modules["zap_module"].made == [one, two]


def test_a_plugin_that_is_not_installed_is_refused_with_those_that_are(site: Site) -> None:
    site.install("")
    known = ", ".join([*BUILT_IN, "tensorboard", "wandb", "zap"])
    assert refusal(activate, ["sparkle"]) == (
        f"plugin 'sparkle' is not installed; installed: {known}; to add it: pip install the package that provides it"
    )


@pytest.mark.parametrize("name", ["tp", "pp", "zero1", "zero2", "zero3", "sac", "bf16", "sft"])
def test_a_plugin_of_femto_that_is_not_installed_is_refused_with_the_line_that_adds_it(name: str, site: Site) -> None:
    assert refusal(activate, [name]).endswith(f"; to add it: pip install 'femto-core[{name}]'")


@pytest.mark.parametrize(("typed", "meant"), [("za", "zap"), ("zapp", "zap"), ("progres", "progress")])
def test_a_misspelt_name_brings_the_nearest_installed_one(typed: str, meant: str, site: Site) -> None:
    site.install("")
    assert refusal(activate, [typed]).startswith(f"plugin {typed!r} is not installed; did you mean {meant!r}?; ")


def test_two_packages_with_one_entry_name_are_refused_whether_it_is_wanted_or_not(site: Site) -> None:
    site.install("", dist="one-dist", version="1.0")
    site.install("", dist="two-dist", version="2.0")
    for function in (activate, list_plugins):
        text = refusal(function, [])
        assert text in {
            f"two packages provide a plugin named 'zap': {first} and {second}; uninstall one of them"
            for first, second in [("one-dist 1.0", "two-dist 2.0"), ("two-dist 2.0", "one-dist 1.0")]
        }


def test_one_package_seen_in_two_folders_is_one_package(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install(taking("femto_log"))
    site.install(taking("femto_log"), folder="older", version="0.9")
    monkeypatch.syspath_prepend(site.folder / "older")
    monkeypatch.syspath_prepend(site.folder)
    assert activate(["zap"]).versions == {"zap": "zap-dist 1.0"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_package_cannot_pass_for_a_built_in_plugin(name: str, site: Site) -> None:
    site.install("", name=name)
    assert refusal(activate, []) == (
        f"zap-dist 1.0 provides a plugin named {name!r}, which is the name of a built-in one; uninstall zap-dist"
    )


# Loading


@pytest.mark.parametrize("need", ["femto-core>=9", "femto_core >=9", "Femto.Core[dev]>=9; python_version >= '3'"])
def test_an_unmet_requirement_on_the_kernel_is_refused_with_both_versions_before_the_import(
    need: str, site: Site
) -> None:
    site.install("raise RuntimeError('imported')", requires=["attrs", need])
    assert refusal(activate, ["zap"]) == (
        f"plugin 'zap' (zap-dist 1.0) needs femto-core>=9, but femto-core {CORE} is installed; upgrade one of the two"
    )


def test_a_plugin_for_an_older_kernel_is_refused_too(site: Site) -> None:
    site.install("", requires=[f"femto-core<{CORE}"])
    assert f"needs femto-core<{CORE}, but femto-core {CORE} is installed" in refusal(activate, ["zap"])


@pytest.mark.parametrize(
    "need",
    [
        f"femto-core>={CORE}",
        "femto-core",
        "femto-core>=9; python_version < '3'",
        "femto-core>=9; extra == 'next'",
        "femto-corex>=9",
    ],
)
def test_a_requirement_that_is_met_or_does_not_apply_is_no_obstacle(need: str, site: Site) -> None:
    site.install(taking("femto_log"), requires=[need])
    assert "zap" in activate(["zap"]).versions


def test_a_plugin_that_fails_to_import_shows_its_own_frames_and_no_others(site: Site) -> None:
    # This folder's name would fool a filter that looks for parts of names.
    folder = "femto_core_importlib"
    helper = site.install(
        "def dig(depth): return 1 / depth if depth == 0 else dig(depth - 1)", name="spade", folder=folder
    )
    module = site.install("import spade_module\nspade_module.dig(1)", folder=folder)
    sys.path.insert(0, str(helper.parent))
    try:
        lines = refusal(activate, ["zap"]).splitlines()
    finally:
        sys.path.remove(str(helper.parent))
    assert lines[0] == "plugin 'zap' (zap-dist 1.0) fails to import:"
    places = [line.strip() for line in lines if line.startswith("  File ")]
    assert places == [
        f'File "{module}", line 4, in <module>',
        f'File "{helper}", line 3, in dig',
        f'File "{helper}", line 3, in dig',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("code", "value", "last"),
    [
        ("import no_such_module", "", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "zap_module:Zap", "AttributeError: module 'zap_module' has no attribute 'Zap'"),
        ("def make(): raise KeyError('key')", "zap_module:make", "KeyError: 'key'"),
        (
            "class Zap:\n    def __init__(self): raise UserError('no')",
            "zap_module:Zap",
            "femto_core.errors.UserError: no",
        ),
        ("def oops(:", "", "SyntaxError: invalid syntax"),
    ],
)
def test_whatever_a_plugin_raises_on_the_way_in_is_told_by_its_name(
    code: str, value: str, last: str, site: Site
) -> None:
    module = site.install(code, value=value)
    lines = refusal(activate, ["zap"]).splitlines()
    assert lines[0] == "plugin 'zap' (zap-dist 1.0) fails to import:"
    assert lines[-1] == last
    assert not any("plugins.py" in line or "frozen" in line for line in lines)
    if code:
        assert any(str(module) in line for line in lines)


def test_a_constructor_that_wants_arguments_is_refused(site: Site) -> None:
    site.install("class Zap:\n    def __init__(self, size): pass", value="zap_module:Zap")
    assert "missing 1 required positional argument: 'size'" in refusal(activate, ["zap"])


# Fitting


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("femto_lr_shedule", "; did you mean 'femto_lr_schedule'?"),
        ("femto_stepend", "; did you mean 'femto_step_end'?"),
        ("femto_optimiser", "; did you mean 'femto_optimizer'?"),
        ("lr_schedule", "; did you mean 'femto_lr_schedule'?"),
        ("qqq", ""),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_nearest_real_one(written: str, hint: str, site: Site) -> None:
    site.install(taking(written))
    assert refusal(activate, ["zap"]) == f"plugin 'zap' implements {written}, which is not a hook{hint}"


def test_a_hook_without_its_marker_is_refused(site: Site) -> None:
    site.install("class Zap:\n    def femto_log(self, step, metrics): pass", value="zap_module:Zap")
    assert refusal(activate, ["zap"]) == "plugin 'zap' has a femto_log without @hookimpl, so it would never be called"


def test_a_hook_that_asks_for_an_argument_it_cannot_get_is_refused_in_one_line(site: Site) -> None:
    site.install("@hookimpl\ndef femto_log(step, colour): pass")
    text = refusal(activate, ["zap"])
    assert text.startswith("plugin 'zap' does not fit the hook specification: ")
    assert "femto_log" in text
    assert "colour" in text
    assert "\n" not in text


def test_an_object_that_cannot_be_hashed_is_refused_with_the_way_out(site: Site) -> None:
    code = "import attrs\n@attrs.define{}\nclass Zap:\n    size: int = 1"
    site.install(code.format(""), value="zap_module:Zap")
    assert refusal(activate, ["zap"]) == (
        "plugin 'zap' cannot be hashed, as pluggy must: write @attrs.define(eq=False)"
    )
    site.install(code.format("(eq=False)"), name="zip", dist="zip-dist", value="zip_module:Zap")
    assert "zip" in activate(["zip"]).versions


def test_two_names_for_one_object_are_refused_together_and_fine_alone(site: Site) -> None:
    site.install("")
    site.install("", name="zip", value="zap_module")
    assert refusal(activate, ["zap", "zip"]) == (
        "plugins 'zap' and 'zip' are the same object, so name only one of them in --plugins"
    )
    assert "zip" in activate(["zip"]).versions


# Seats


def test_two_claims_on_one_seat_are_refused_with_both_plugins_and_what_to_remove(site: Site) -> None:
    site.install(taking("femto_optimizer"), name="one", dist="one-dist", version="1.0")
    site.install(taking("femto_optimizer") + taking("femto_log"), name="two", dist="two-dist", version="2.5")
    words = (
        "'one' (one-dist 1.0) and 'two' (two-dist 2.5) both take the seat femto_optimizer, which has room for one; "
        "remove 'one' or 'two' from --plugins"
    )
    assert refusal(activate, ["one", "two"]) == words
    assert refusal(run_command, ["train", "--plugins", "one,two"]) == words


def test_two_plugins_in_different_seats_get_along(site: Site) -> None:
    site.install(taking("femto_optimizer", "'an optimizer'"), name="one", dist="one-dist")
    site.install(taking("femto_loss", "'a loss'"), name="two", dist="two-dist")
    hooks = Hooks(activate(["one", "two"]).manager)
    assert call(hooks, "femto_optimizer")[0] == "an optimizer"
    assert call(hooks, "femto_loss")[0] == "a loss"


def test_the_default_sits_where_a_plugin_declines(site: Site) -> None:
    site.install(taking("femto_lr_schedule", "None"))
    schedule = Hooks(activate(["zap"]).manager).seat(hookspecs.femto_lr_schedule, config=Config())
    assert schedule(0) == pytest.approx(1 / 21)


# The hooks with role and arguments, in the order of calling.
HOOKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "femto_commands": ("setup", ("registry",)),
    "femto_config_section": ("setup", ()),
    "femto_config_defaults": ("setup", ()),
    "femto_validate": ("setup", ("config",)),
    "femto_mesh_axes": ("layout", ("config",)),
    "femto_dataset": ("content", ("config", "split")),
    "femto_collator": ("content", ("config",)),
    "femto_split_tokens": ("layout", ("config", "mesh")),
    "femto_loader": ("content", ("config", "mesh", "dataset", "collator")),
    "femto_model": ("content", ("config",)),
    "femto_transform_model": ("content", ("model", "config")),
    "femto_schedule": ("layout", ("config", "mesh")),
    "femto_parallelize": ("layout", ("stage", "mesh", "config")),
    "femto_wrap_layer": ("layout", ("name", "layer", "stage", "config")),
    "femto_precision": ("layout", ("config", "mesh")),
    "femto_sharding": ("layout", ("config", "mesh")),
    "femto_optimizer": ("content", ("config", "mesh", "shares")),
    "femto_lr_schedule": ("content", ("config",)),
    "femto_token_statistics": ("layout", ("config", "mesh")),
    "femto_loss": ("content", ("config", "mesh")),
    "femto_checkpointer": ("setup", ("config", "mesh")),
    "femto_checkpoint_state": ("setup", ()),
    "femto_train_begin": ("observe", ("trainer",)),
    "femto_step_begin": ("observe", ("trainer", "step")),
    "femto_step_end": ("observe", ("trainer", "info")),
    "femto_log": ("observe", ("trainer", "step", "metrics")),
    "femto_train_end": ("observe", ("trainer", "error")),
    "femto_export": ("setup", ("tensors", "saved", "settings")),
}
SEATS = [name for name in HOOKS if is_seat(name)]
RETURN_NOTHING = (
    "femto_commands",
    "femto_validate",
    "femto_transform_model",
    "femto_parallelize",
    "femto_train_begin",
    "femto_step_begin",
    "femto_step_end",
    "femto_log",
    "femto_train_end",
    "femto_export",
)


def call(hooks: Hooks, name: str, **values: object) -> tuple[Any, dict[str, object]]:
    """Call hook `name`, each argument one of `values` or an object of its own; return result and arguments."""
    given = {argument: values.get(argument, object()) for argument in HOOKS[name][1]}
    spec: Any = getattr(hookspecs, name)
    act: Any = hooks.seat if name in SEATS else hooks.call if name in RETURN_NOTHING else hooks.collect
    return act(spec, **given), given


def test_the_table_above_is_the_whole_specification_with_every_hooks_role() -> None:
    found = {
        name: (hook_role(name), tuple(inspect.signature(getattr(hookspecs, name)).parameters)) for name in hook_names()
    }
    assert list(found.items()) == list(HOOKS.items())
    assert {role for role, _ in HOOKS.values()} == set(get_args(hookspecs.Role))


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_hands_on_every_argument_and_returns_what_the_plugin_returned(name: str) -> None:
    seen: list[dict[str, object]] = []
    answer = object()

    def note(**arguments: object) -> object:
        seen.append(arguments)
        return answer

    given = ", ".join(HOOKS[name][1])
    passed = ", ".join(f"{argument}={argument}" for argument in HOOKS[name][1])
    function = eval(f"lambda self, {given}: note({passed})", {"note": note})
    plugin = type("Zap", (), {name: hookimpl(function)})()
    result, arguments = call(Hooks(activate(QUIET, objects={"zap": plugin}).manager), name)
    assert seen == [arguments]
    assert result == (answer if name in SEATS else None if name in RETURN_NOTHING else [answer])


@pytest.mark.parametrize("name", HOOKS)
def test_a_plugin_has_the_role_of_the_hook_that_it_implements(name: str) -> None:
    plugin = type("Zap", (), {name: hookimpl(eval("lambda self: None"))})()
    wrapper = type("Zip", (), {name: hookimpl(wrapper=True)(passing_on)})()
    infos = activate(QUIET, objects={"zap": plugin, "zip": wrapper}).active
    assert [info.roles for info in infos] == [{HOOKS[name][0]}] * 2


def passing_on(self: object) -> Generator[None, Any, Any]:
    """Wrap a hook without changing anything."""
    return (yield)


@pytest.mark.parametrize("name", SEATS)
def test_a_seat_left_empty_by_blocking_its_default_is_refused_by_name(name: str, site: Site) -> None:
    hooks = Hooks(activate(["no:defaults", "no:data", "no:checkpoint"]).manager)
    assert refusal(call, hooks, name) == (
        f"nobody takes the seat {name}: the built-in default is blocked, and no active plugin has it"
    )


@pytest.mark.parametrize("name", SEATS)
def test_two_claims_are_refused_for_every_seat(name: str, site: Site) -> None:
    site.install(taking(name), name="one", dist="one-dist")
    site.install(taking(name), name="two", dist="two-dist")
    assert f"both take the seat {name}, which has room for one" in refusal(activate, ["one", "two"])


# Wrappers

WRAPPER = """
    @hookimpl(wrapper=True{order})
    def femto_lr_schedule():
        inner = yield
        return ("{name}", inner)
"""


def test_a_wrapper_is_no_claim_and_goes_around_whoever_takes_the_seat(site: Site) -> None:
    site.install(WRAPPER.format(name="around", order=""), name="around", dist="around-dist")
    site.install(taking("femto_lr_schedule", "'taken'"), name="taker", dist="taker-dist")
    for names in (["around", "taker"], ["taker", "around"]):
        assert call(Hooks(activate(names).manager), "femto_lr_schedule")[0] == ("around", "taken")


def test_a_wrapper_goes_around_the_default_where_nobody_takes_the_seat(site: Site) -> None:
    site.install(WRAPPER.format(name="around", order=""), name="around", dist="around-dist")
    wrapped, _ = call(Hooks(activate(["around"]).manager), "femto_lr_schedule", config=Config())
    assert wrapped[0] == "around"
    assert wrapped[1](0) == pytest.approx(1 / 21)


def test_wrappers_nest_the_last_named_outermost_and_may_ask_for_another_place(site: Site) -> None:
    for name, order in (("one", ""), ("two", ""), ("three", ", trylast=True")):
        site.install(WRAPPER.format(name=name, order=order), name=name, dist=f"{name}-dist")
    site.install(taking("femto_lr_schedule", "'taken'"), name="taker", dist="taker-dist")
    wrapped, _ = call(Hooks(activate(["one", "two", "taker", "three"]).manager), "femto_lr_schedule")
    assert wrapped == ("two", ("one", ("three", "taken")))


def test_a_wrapper_of_a_seat_that_is_left_empty_has_nothing_to_go_around(site: Site) -> None:
    site.install("@hookimpl(wrapper=True)\ndef femto_lr_schedule():\n    return (yield)\n")
    hooks = Hooks(activate(["zap", "no:defaults"]).manager)
    assert "nobody takes the seat femto_lr_schedule" in refusal(call, hooks, "femto_lr_schedule")


def test_the_listing_says_which_seats_a_plugin_wraps(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    both = "@hookimpl(wrapper=True)\ndef femto_loss():\n    return (yield)\n" + taking("femto_optimizer")
    site.install(both + taking("femto_log"))
    assert run_command(["plugins", "--plugins", "zap"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("zap ")]
    assert " ".join(row.split()[2:]) == "1.0 active seat optimizer, around loss; log"
    assert run_command(["plugins", "--json", "--plugins", "zap"]) == 0
    [entry] = [entry for entry in json.loads(capsys.readouterr().out) if entry["name"] == "zap"]
    assert (entry["seats"], entry["wraps"], entry["hooks"]) == (["femto_optimizer"], ["femto_loss"], ["femto_log"])


@pytest.mark.parametrize("name", SEATS)
def test_every_seat_has_a_default(name: str) -> None:
    assert any(name in info.seats for info in list_plugins([]) if info.name in BUILT_IN)


# Blocking


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_plugin_can_be_blocked(name: str) -> None:
    active = activate([f"no:{name}"])
    assert [p.name for p in active.active] == [other for other in BUILT_IN if other != name]
    assert not active.manager.has_plugin(name)


def test_a_blocked_plugin_is_not_imported(site: Site) -> None:
    site.install("raise RuntimeError('imported')")
    assert activate(["no:zap"]).versions == {}


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("zap,no:zap", "--plugins names zap and no:zap"),
        ("no:zap,zap", "--plugins names zap and no:zap"),
        ("zap,zap", "--plugins names zap twice"),
        ("progress,progress", "--plugins names progress twice"),
        ("no:progress,no:progress", "--plugins names no:progress twice"),
    ],
)
def test_a_list_that_contradicts_or_repeats_itself_is_refused(names: str, sentence: str, site: Site) -> None:
    site.install("")
    assert refusal(run_command, ["train", "--plugins", names]) == sentence


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("progres", "; did you mean 'progress'?"), ("zp", "; did you mean 'zap'?"), ("qqq", ""), ("", "")],
)
def test_blocking_what_does_not_exist_is_refused(typed: str, hint: str, site: Site) -> None:
    site.install("")
    assert refusal(activate, [f"no:{typed}"]) == f"no:{typed} blocks a plugin that does not exist{hint}"


# Sections

SECTION = """
    import attrs
    @attrs.frozen(kw_only=True)
    class Section:
        size: int = 1
    @hookimpl
    def femto_config_section():
        return "{name}", Section
    @hookimpl
    def femto_validate(config):
        raise UserError(f"validated with size {{config.section(Section).size}}")
"""


def test_the_section_of_an_active_plugin_is_filled_from_file_and_flags(site: Site, tmp_path: Path) -> None:
    site.install(SECTION.format(name="sparks"))
    path = tmp_path / "run.toml"
    path.write_text("plugins = ['zap']\n[sparks]\nsize = 2")
    assert refusal(run_command, ["train", str(path)]) == "validated with size 2"
    assert refusal(run_command, ["train", str(path), "--sparks.size", "3"]) == "validated with size 3"
    assert refusal(run_command, ["--plugins", "zap", "--sparks.size=4"]) == "validated with size 4"


def test_the_section_of_an_inactive_plugin_is_refused(site: Site, tmp_path: Path) -> None:
    site.install(SECTION.format(name="sparks"))
    path = tmp_path / "run.toml"
    path.write_text("[sparks]\nsize = 2")
    assert refusal(run_command, ["train", str(path)]) == (
        f"unknown section [sparks] ({path}, line 1); is its plugin active? (--plugins)"
    )
    assert refusal(run_command, ["train", "--sparks.size", "3"]) == (
        "unknown flag --sparks.size; is its plugin active? (--plugins) (femto train --help lists all)"
    )


@pytest.mark.parametrize(
    ("name", "section", "key"),
    [("samples", "sample", "every"), ("progress", "log", "every"), ("profiler", "profile", "step")],
)
def test_the_section_of_a_blocked_built_in_plugin_goes_with_it(
    site: Site, tmp_path: Path, name: str, section: str, key: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[{section}]\n{key} = 1\n[train]\nsteps = 1\nstop_after = 2")
    assert "lies beyond train.steps" in refusal(run_command, ["train", str(path)]), "it is known otherwise"
    assert refusal(run_command, ["train", str(path), "--plugins", f"no:{name}"]) == (
        f"unknown section [{section}] ({path}, line 1); is its plugin active? (--plugins)"
    )


def test_the_flags_of_an_active_plugin_are_in_help(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install(SECTION.format(name="sparks"))
    assert run_command(["train", "--plugins", "zap", "--help"]) == 0
    assert "--sparks.size INT" in capsys.readouterr().out


def test_two_sections_of_one_name_are_refused_with_both_owners(site: Site) -> None:
    site.install(SECTION.format(name="sparks"), name="one", dist="one-dist")
    site.install(SECTION.format(name="sparks"), name="two", dist="two-dist")
    assert refusal(run_command, ["train", "--plugins", "one,two"]) == (
        "two active plugins bring a config section [sparks]: one_module and two_module; "
        "remove one of them from --plugins"
    )


def test_plugins_may_share_one_section_class(site: Site) -> None:
    site.install(SECTION.format(name="sparks"), name="one", dist="one-dist")
    shared = "from one_module import Section\n@hookimpl\ndef femto_config_section(): return 'sparks', Section"
    site.install(shared, name="two", dist="two-dist")
    assert refusal(run_command, ["train", "--plugins", "one,two"]) == "validated with size 1"


def test_a_section_that_takes_a_name_of_the_kernel_is_refused(site: Site) -> None:
    site.install(SECTION.format(name="train"))
    assert refusal(run_command, ["train", "--plugins", "zap"]) == (
        "config section [train] of zap_module is one of femto's own; rename it"
    )


# Which plugins are asked for


@pytest.mark.parametrize(
    ("environment", "toml", "flags", "expected"),
    [
        ("", "", [], []),
        ("", "plugins = ['one']\n", [], ["one"]),
        ("two", "plugins = ['one']\n", [], ["two"]),
        ("two", "plugins = ['one']\n", ["--plugins", "three"], ["three"]),
        (" one , two,", "", [], ["one", "two"]),
        ("", "", ["--plugins=one, three"], ["one", "three"]),
    ],
)
def test_names_come_from_the_flag_else_the_environment_else_the_file(
    environment: str,
    toml: str,
    flags: list[str],
    expected: list[str],
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("one", "two", "three"):
        site.install(f"@hookimpl\ndef femto_validate(config): heard.append({name!r})\nheard = []", name=name)
    path = tmp_path / "run.toml"
    path.write_text(
        toml + "[train]\nsteps = 1\nstop_after = 2"
    )  # refused by the default validation, which is called last
    monkeypatch.setenv("FEMTO_PLUGINS", environment)
    assert "lies beyond train.steps" in refusal(run_command, ["train", str(path), *flags])
    heard = [name for name in ("one", "two", "three") if f"{name}_module" in sys.modules]
    assert heard == expected
    assert all(sys.modules[f"{name}_module"].heard == [name] for name in heard)


def test_plugins_without_names_are_refused() -> None:
    assert refusal(run_command, ["train", "--plugins"]) == "--plugins needs names, separated by commas"


# Order


def test_plugins_are_called_before_the_kernel_and_the_last_named_first(site: Site) -> None:
    for name in ("zeta", "alpha"):
        site.install("@hookimpl\ndef femto_validate(config): pass\n@hookimpl\ndef femto_log(step): pass", name=name)
    lines: list[str] = []
    hooks = Hooks(activate(["zeta", "alpha"], lines.append).manager)
    config = make_config(config_class(hooks.config_sections()), {}, {})
    lines.clear()
    call(hooks, "femto_validate", config=config)
    call(Hooks(activate([*OBSERVERS, "zeta", "alpha"], lines.append).manager), "femto_log")
    assert lines == [
        "femto_validate(config) -> alpha, zeta, profiler, defaults",
        "femto_log(trainer, step, metrics) -> alpha, zeta",
    ]


class Wrapper(nn.Module):
    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name, self.inner = name, inner


@attrs.frozen
class Wrapping:
    name: str

    @hookimpl
    def femto_wrap_layer(self, name: str, layer: nn.Module) -> nn.Module:
        return Wrapper(f"{self.name} of {name}", layer)


class Abstaining:
    def __init__(self) -> None:
        self.saw: list[nn.Module] = []

    @hookimpl
    def femto_wrap_layer(self, layer: nn.Module) -> None:
        self.saw.append(layer)


def wrapped_by_all(hooks: Hooks, name: str, layer: nn.Module) -> Any:
    stage, config = cast("Stage", object()), Config()
    for wrap in hooks.layer_wrappers():
        layer = next(iter(wrap(name=name, layer=layer, stage=stage, config=config)), layer)
    return layer


def test_wrappers_of_layers_nest_the_last_named_innermost_and_nobody_wraps_twice() -> None:
    idle = Abstaining()
    objects: Mapping[str, object] = {"a": Wrapping("a"), "idle": idle, "b": Wrapping("b"), "c": Wrapping("c")}
    layer = nn.Linear(1, 1)
    wrapped = wrapped_by_all(Hooks(activate([], objects=objects).manager), "layers.3", layer)
    names = []
    while isinstance(wrapped, Wrapper):
        names.append(wrapped.name)
        wrapped = wrapped.inner
    assert names == ["a of layers.3", "b of layers.3", "c of layers.3"]
    assert wrapped is layer
    assert [cast("Wrapper", seen).name for seen in idle.saw] == ["b of layers.3"]


def test_a_layer_that_nobody_wraps_is_left_as_it_is() -> None:
    layer = nn.Linear(1, 1)
    assert wrapped_by_all(Hooks(activate([]).manager), "layers.0", layer) is layer


# Seeing


@pytest.mark.parametrize(("rank", "wish"), [("0", "1"), ("3", "yes")])
def test_a_trace_names_each_hook_its_arguments_and_who_is_called(
    rank: str, wish: str, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(SECTION.format(name="sparks"))
    monkeypatch.setenv("FEMTO_TRACE_HOOKS", wish)
    monkeypatch.setenv("RANK", rank)
    refusal(run_command, ["train", "--plugins", "zap"])
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"[rank {rank}] hook femto_config_section() -> zap, profiler, progress, samples, data",
        f"[rank {rank}] hook femto_config_defaults() -> nobody",
        f"[rank {rank}] hook femto_validate(config) -> zap, profiler, defaults",
    ]
    assert out == ""


def test_a_trace_says_so_where_nobody_is_called() -> None:
    lines: list[str] = []
    Hooks(activate([], lines.append).manager).collect(hookspecs.femto_mesh_axes, config=Config())
    assert lines == ["femto_mesh_axes(config) -> nobody"]


@pytest.mark.parametrize("wish", ["", "0"])
def test_there_is_no_trace_where_nobody_asks(
    wish: str, site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(SECTION.format(name="sparks"))
    monkeypatch.setenv("FEMTO_TRACE_HOOKS", wish)
    refusal(run_command, ["train", "--plugins", "zap"])
    assert capsys.readouterr() == ("", "")


def test_the_json_listing_has_seats_hooks_versions_and_what_is_wrong(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(taking("femto_optimizer") + taking("femto_log"), version="2.5")
    site.install("1 / 0", name="broken", dist="broken-dist")
    site.install(taking("femto_shedule"), name="typo", dist="typo-dist")
    site.install("", name="newer", dist="newer-dist", requires=["femto-core>=9"])
    assert run_command(["plugins", "--json", "--plugins", "zap,no:progress"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(listed)[: len(BUILT_IN)] == list(BUILT_IN)
    assert listed["zap"] == {
        "name": "zap",
        "distribution": "zap-dist",
        "version": "2.5",
        "active": True,
        "seats": ["femto_optimizer"],
        "wraps": [],
        "hooks": ["femto_log"],
        "problem": "",
    }
    inactive = {"progress", "tensorboard", "wandb", "broken", "typo", "newer"}
    assert {name for name, entry in listed.items() if not entry["active"]} == inactive
    assert listed["broken"]["problem"].endswith("ZeroDivisionError: division by zero")
    assert listed["typo"]["problem"].endswith("which is not a hook; did you mean 'femto_schedule'?")
    assert f"needs femto-core>=9, but femto-core {CORE} is installed" in listed["newer"]["problem"]
    assert [name for name, entry in listed.items() if entry["problem"]] == ["broken", "newer", "typo"]


def test_the_listing_names_each_plugin_its_package_state_and_hooks_or_its_problem(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(taking("femto_optimizer") + taking("femto_log"), version="2.5")
    site.install("1 / 0", name="broken", dist="broken-dist")
    assert run_command(["plugins", "--plugins", "zap"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line and line[0] != " "}
    assert rows["zap"] == "zap-dist 2.5 active seat optimizer; log"
    assert rows["recorder"] == f"femto-core {CORE} active train_begin, log, train_end"
    assert rows["wandb"] == f"femto-core {CORE} - train_begin, log, train_end"
    assert rows["broken"].startswith("broken-dist 1.0 - plugin 'broken' (broken-dist 1.0) fails to import:")
    assert "ZeroDivisionError: division by zero" in out


def test_the_listing_refuses_a_name_that_is_not_installed(site: Site) -> None:
    assert refusal(run_command, ["plugins", "--plugins", "zap"]).startswith(
        "plugin 'zap' is not installed; installed: "
    )


def test_the_listing_refuses_other_words() -> None:
    assert refusal(run_command, ["plugins", "--jsn"]) == (
        "unknown flag --jsn; did you mean '--json'? (femto plugins --help lists all)"
    )
    assert refusal(run_command, ["hooks", "log"]) == "unexpected argument 'log' (femto hooks --help lists all)"


# Commands

COMMAND = """
    import attrs

    @attrs.frozen
    class Options:
        what: str = attrs.field(metadata={{"positional": True}})
        two: bool = False

    @hookimpl
    def femto_commands(registry):
        registry.add("{name}", "sparkle", Options, lambda options: print(options) or 7)
"""


@attrs.frozen
class Nothing:
    """No options."""


def test_a_command_of_an_active_plugin_gets_its_options(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install(COMMAND.format(name="sparkle"))
    assert run_command(["sparkle", "--plugins", "zap", "one", "--two"]) == 7
    assert capsys.readouterr().out == "Options(what='one', two=True)\n"
    monkeypatch.setenv("FEMTO_PLUGINS", "zap")
    assert run_command(["--help"]) == 0
    assert "femto sparkle      sparkle\n" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_nearest_and_all(site: Site) -> None:
    site.install(COMMAND.format(name="sparkle"))
    said = refusal(run_command, ["trian"])
    assert said.startswith("unknown command 'trian'; did you mean 'train'? (commands: train, plugins, hooks, ")
    assert said.endswith(", or a RUN.toml)")
    for command in ("export", "checkpoint", "preprocess"):
        assert f"{command}, " in said
    assert "sparkle" not in refusal(run_command, ["qqq"])
    assert "sparkle, " in refusal(run_command, ["qqq", "--plugins", "zap"])


def test_a_command_of_a_plugin_that_is_not_active_names_the_plugin(site: Site) -> None:
    site.install(COMMAND.format(name="sparkle"))
    said = refusal(run_command, ["sparkle"])
    assert said == "sparkle is a command of plugin zap, which is not active: femto sparkle --plugins zap"


def test_two_commands_of_one_name_are_refused(site: Site) -> None:
    site.install(COMMAND.format(name="train"))
    assert refusal(run_command, ["qqq", "--plugins", "zap"]) == "two plugins add a command called 'train'"
    registry = CommandRegistry(None, [])
    registry.add("one", "", Nothing, lambda options: 0)
    assert refusal(registry.add, "one", "", Nothing, lambda options: 1) == "two plugins add a command called 'one'"
    assert registry.commands["one"].run(Nothing()) == 0


# All ranks


@attrs.frozen
class TwoRanks:
    """A mesh whose other rank says `other`."""

    other: dict[str, Any]

    def gather_objects(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [mine, {**mine, **self.other}]


def test_ranks_with_other_plugins_versions_or_settings_are_refused(site: Site) -> None:
    site.install("")
    active = activate(["zap"])

    def check(**other: Any) -> None:
        check_equal_everywhere(cast(Mesh, TwoRanks(other)), Config(), active)

    check()
    tail = "install and start the same on every machine"
    assert refusal(lambda: check(plugins={"zap": "zap-dist 1.1"})) == (
        f"rank 1 differs from rank 0 in plugins: zap is 'zap-dist 1.1' there and 'zap-dist 1.0' on rank 0; {tail}"
    )
    assert refusal(lambda: check(plugins={})) == (
        f"rank 1 differs from rank 0 in plugins: zap is None there and 'zap-dist 1.0' on rank 0; {tail}"
    )
    changed = attrs.evolve(Config(), plugins=("other",)).to_dict()
    assert refusal(lambda: check(config=changed)) == (
        f"rank 1 differs from rank 0 in config: plugins is ('other',) there and () on rank 0; {tail}"
    )


def test_the_installed_plugins_are_listed_by_name(site: Site) -> None:
    site.install("", name="b", dist="b-dist")
    site.install("", name="a", dist="a-dist")
    assert list(installed_plugins()) == ["a", "b", "tensorboard", "wandb"]
