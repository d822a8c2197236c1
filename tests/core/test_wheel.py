"""What users install: the kernel's wheel and a third party's plugin, in an environment without this repository.

The slowest file of the suite: it builds two wheels and starts femto a few times.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = ("femto_checkpoint", "femto_core", "femto_data", "femto_ops", "femto_report", "femto_tools")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
SMALL = shlex.split("""
    --train.steps 6 --train.threads 1 --optim.warmup 1 --optim.lr 0.01 --eval.every 0 --data.seq-len 16
    --data.global-batch 4 --model.layers 1 --model.hidden-size 16 --model.intermediate-size 24 --model.heads 2
    --model.kv-heads 1
""")


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, with nothing in the environment that leads back to this repository."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FEMTO_", "PYTHON", "RANK", "WORLD_", "LOCAL_"))}
    settings = {**kept, "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=300)


def succeed(command: Sequence[str | Path], folder: Path) -> str:
    done = run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of `source` in a copy, so that no old build folder can slip in, and none is left behind."""
    copy = folder / "source"
    copy.mkdir(parents=True)
    for part in ("pyproject.toml", "README.md"):
        shutil.copy(source / part, copy)
    for package in (*PACKAGES, "example_plugin"):
        if (source / package).is_dir():
            shutil.copytree(source / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        isolation = [] if Version(version("setuptools")) < Version("77") else ["--no-build-isolation", "--no-index"]
    except PackageNotFoundError:
        isolation = []
    succeed([*PIP, "wheel", "--no-deps", *isolation, "--wheel-dir", folder, copy], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@attrs.frozen
class Environment:
    """A virtual environment of its own, which borrows only third parties' packages from the one that runs the tests."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *wheels: Path) -> Environment:
        venv.create(folder / "venv", with_pip=False)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        succeed([*PIP, "--python", cls(folder).python, "install", "--no-deps", "--no-index", *wheels], folder)
        # A path in a .pth file is searched last, and the .pth files in it (editable installs) are not read.
        borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (site / "borrowed.pth").write_text("\n".join(borrowed))
        return cls(folder)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def femto(self) -> Path:
        return self.folder / "venv" / "bin" / "femto"

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The steps of the run `name`."""
        return [json.loads(line) for line in (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("core"))


@pytest.fixture(scope="module")
def plugin_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT / "examples" / "third_party_plugin", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, core_wheel: Path) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("alone"), core_wheel)


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory, core_wheel: Path, plugin_wheel: Path) -> Environment:
    return Environment.create(tmp_path_factory.mktemp("extended"), core_wheel, plugin_wheel)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, alone: Environment) -> Path:
    """A small dataset, prepared by the installed command."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "texts").mkdir()
    for number in range(4):
        lines = [f"Number {i} is {'even' if i % 2 == 0 else 'odd'}." for i in range(number, 200, 3)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    words = ["preprocess", "--input", "texts", "--seq-len", "16", "--vocab-size", "300", "--output", "rows"]
    succeed([alone.femto, *words], folder)
    return folder / "rows"


def test_the_wheel_holds_all_its_packages_whole_and_nothing_else(core_wheel: Path) -> None:
    names = zipfile.ZipFile(core_wheel).namelist()
    found = {name for name in names if ".dist-info/" not in name}
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.suffix in (".py", ".typed")]
    assert found == {str(file.relative_to(ROOT)) for file in files}
    assert {f"{package}/py.typed" for package in PACKAGES} <= found


def test_the_wheels_carry_ranges_and_no_exact_versions(core_wheel: Path, plugin_wheel: Path) -> None:
    for wheel in (core_wheel, plugin_wheel):
        archive = zipfile.ZipFile(wheel)
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        needs = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
        assert needs
        assert [n for n in needs if any(s.operator in ("==", "===") for s in Requirement(n).specifier)] == []


def test_the_environment_has_only_the_wheels_femto(extended: Environment) -> None:
    code = (
        "import sys, femto_checkpoint, femto_core, femto_data, femto_ops, femto_report, femto_tools, example_plugin\n"
        "import importlib.metadata as m\n"
        "modules = femto_checkpoint, femto_core, femto_data, femto_ops, femto_report, femto_tools, example_plugin\n"
        "print(*(module.__file__ for module in modules), m.distribution('femto-core').locate_file(''), sep='\\n')\n"
        "print(*(type(finder).__name__ + str(finder) for finder in sys.meta_path if 'ditable' in str(finder)))"
    )
    *places, editable = succeed([extended.python, "-c", code], extended.folder).split("\n")[:-1]
    assert len(places) == len(PACKAGES) + 2
    assert all(place.startswith(str(extended.folder / "venv")) for place in places)
    assert editable == ""


@pytest.fixture(scope="module")
def plain_run(alone: Environment, data: Path) -> list[dict[str, Any]]:
    """The steps of a run with the kernel alone."""
    out = succeed([alone.femto, "train", "--run.name", "plain", "--data.path", str(data), *SMALL], alone.folder)
    assert "plugins: none" in out
    return alone.metrics("plain")


def test_the_kernel_trains_alone(plain_run: list[dict[str, Any]]) -> None:
    steps = plain_run
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert abs(steps[0]["loss"] - math.log(300)) < 0.5
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert len({line["lr"] for line in steps}) == 6


def test_a_plugin_that_is_not_installed_is_refused_before_anything_is_written(
    alone: Environment, data: Path, tmp_path: Path
) -> None:
    done = run([alone.femto, "--plugins", "invsqrt", "--data.path", str(data), *SMALL], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("femto: plugin 'invsqrt' is not installed; installed: defaults, data, ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_installed_plugin_that_is_not_named_changes_nothing(
    plain_run: list[dict[str, Any]], extended: Environment, data: Path
) -> None:
    words = ["train", "--run.name", "unnamed", "--data.path", str(data), *SMALL]
    succeed([extended.femto, *words], extended.folder)
    for before, after in zip(plain_run, extended.metrics("unnamed"), strict=True):
        assert [before[key] for key in ("step", "loss", "grad_norm", "lr")] == [
            after[key] for key in ("step", "loss", "grad_norm", "lr")
        ]
    assert not (extended.folder / "runs" / "unnamed" / "spikes.tsv").exists()


def test_a_third_partys_plugin_takes_its_seat_and_watches_every_step(extended: Environment, data: Path) -> None:
    flags = ["--plugins", "invsqrt", "--invsqrt.timescale", "2", "--invsqrt.spike", "1e-3"]
    words = ["train", "--run.name", "named", "--data.path", str(data), *flags, *SMALL]
    out = succeed([extended.femto, *words], extended.folder)
    assert "plugins: invsqrt" in out
    steps = extended.metrics("named")
    expected = [0.01 * min(step / 2, math.sqrt(2 / step)) for step in range(1, 7)]
    assert [line["lr"] for line in steps] == pytest.approx(expected, rel=1e-12)
    folder = extended.folder / "runs" / "named"
    head, *rows = [line.split("\t") for line in (folder / "spikes.tsv").read_text().splitlines()]
    assert head == ["step", "grad_norm", "median"]
    norms = [line["grad_norm"] for line in steps]
    # With so small a factor every step but the first, which has no median yet, is a spike.
    assert [(int(step), float(norm), float(median)) for step, norm, median in rows] == [
        (step, norms[step - 1], statistics.median(norms[: step - 1])) for step in range(2, 7)
    ]
    assert "[invsqrt]\ntimescale = 2\nspike = 0.001\n" in (folder / "config.toml").read_text()
    installed = json.loads((folder / "env.json").read_text())["plugins"]
    assert installed == {"invsqrt": "femto-example-plugin 0.1.0"}


def test_a_third_partys_plugin_is_listed_with_its_seat(extended: Environment) -> None:
    words = ["plugins", "--json", "--plugins", "invsqrt"]
    listed = {plugin["name"]: plugin for plugin in json.loads(succeed([extended.femto, *words], extended.folder))}
    assert listed["invsqrt"] == {
        "name": "invsqrt",
        "distribution": "femto-example-plugin",
        "version": "0.1.0",
        "active": True,
        "seats": ["femto_lr_schedule"],
        "wraps": [],
        "hooks": ["femto_config_section", "femto_validate", "femto_train_begin", "femto_step_end"],
        "problem": "",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--invsqrt.timescale 0", "invsqrt.timescale = '0' (on the command line): must be greater than 0"),
        ("--optim.schedule linear", "optim.schedule = 'linear' has no effect beside plugin invsqrt; drop one"),
    ],
)
def test_a_third_partys_settings_are_refused_like_femtos_own(flags: str, words: str, extended: Environment) -> None:
    done = run([extended.femto, "--plugins", "invsqrt", *flags.split()], extended.folder)
    assert (done.returncode, done.stderr) == (2, f"femto: {words}\n")
