"""What the kernel's files may know: of each other, of the environment, of plugins, of anything that can change."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from femto_core.plugins import hook_names

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "femto_core"
PACKAGES = ("femto_core", "femto_data", "femto_report", "femto_tools", "femto_ops", "femto_checkpoint")
MOST_LINES = 300
MOST_KERNEL_CODE = 3000


def sources(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py") if "build" not in file.parts)


def shipped() -> list[Path]:
    """Every file that users install: the kernel's packages and the plugins."""
    return sources(*(ROOT / name for name in PACKAGES), ROOT / "plugins")


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


# The instruments, each shown to work before it is used


def import_order() -> list[str]:
    """The first word of each line of docs/architecture.md's block "text imports", and `__main__` below them all."""
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"^```text imports\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert block, "docs/architecture.md has no block ```text imports"
    return [*re.findall(r"^\w+", block[1], re.MULTILINE), "__main__"]


def imported(source: str) -> set[str]:
    """Dotted names of femto modules that `source` imports at run time, inside functions too."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.orelse:
                visit(statement)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in within if (ROOT / name.replace(".", "/")).with_suffix(".py").exists()}
            found.update(modules or {node.module or ""})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return {name for name in found if name.split(".")[0].startswith("femto_")}


def code_lines(source: str) -> int:
    """Lines of `source` that are neither blank, comment nor docstring; a docstring is any string that stands alone."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    written: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            written.update(range(token.start[0], token.end[0] + 1))
    return len(written - documented)


def without_prose(source: str) -> str:
    """Return `source` without comments and docstrings: unparsing drops the first, and this the second."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value = ast.Constant(...)
    return ast.unparse(tree)


def environment_reads(source: str) -> list[int]:
    """Lines that name the environment, however it is imported."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, field, None) for field in ("id", "attr", "name")]
        if any(name in ("environ", "environb", "getenv", "putenv", "unsetenv") for name in names):
            lines.append(getattr(node, "lineno", 0))
    return lines


MUTABLE_CALLS = ("list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "local")
MUTATORS = (
    *("append", "add", "update", "setdefault", "pop", "popitem", "clear"),
    *("extend", "insert", "remove", "discard", "sort", "appendleft"),
)
MEMORIES = ("cache", "lru_cache")
FIXED = ("tuple", "str", "int", "float", "bool", "bytes", "frozenset")


def shared_state(source: str) -> list[str]:
    """What in `source` one caller could change under another: `global`, caches, and containers that outlive a call.

    A container in CAPITALS is a table, and allowed as long as nobody in the file changes it; a function may remember
    results of a type that cannot change.
    """
    tree = ast.parse(source)
    found, tables = [], set()
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not _is_mutable(statement.value):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            name = ast.unparse(target)
            if name.isupper():
                tables.add(name)
            elif not name.startswith("__"):
                found.append(f"{statement.lineno}: {name} is a container that outlives a call")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.FunctionDef) and any(_last_name(d) in MEMORIES for d in node.decorator_list):
            result = node.returns.value if isinstance(node.returns, ast.Subscript) else node.returns
            if result is None or _last_name(result) not in FIXED:
                found.append(f"{node.lineno}: {node.name} remembers results that can change")
        if (name := _changed(node)) in tables:
            found.append(f"{getattr(node, 'lineno', 0)}: {name} is changed")
    return found


def _is_mutable(value: ast.AST | None) -> bool:
    containers = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, containers) or (isinstance(value, ast.Call) and _last_name(value) in MUTABLE_CALLS)


def _last_name(node: ast.AST) -> str:
    """`defaultdict` for collections.defaultdict(list)."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _changed(node: ast.AST) -> str:
    """The variable whose contents `node` changes, or nothing."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return _last_name(node.value)
    if isinstance(node, ast.AugAssign):
        return _last_name(node.target)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return _last_name(node.func.value)
    return ""


def test_the_reader_of_imports_sees_all_but_those_for_type_checkers() -> None:
    source = """
import os, femto_core.mesh
from femto_core import plugins as p, hooks
from femto_core.errors import UserError
if TYPE_CHECKING:
    from femto_core.trainer import Trainer
else:
    import femto_data
def function():
    from femto_core.model import Stage
"""
    names = {"mesh", "plugins", "hooks", "errors", "model"}
    assert imported(source) == {f"femto_core.{name}" for name in names} | {"femto_data"}


def test_the_counter_of_code_counts_neither_prose_nor_blank_lines() -> None:
    source = '''"""Two
lines."""

# a comment
x = 1  # another
"""Of x."""

def f(a,
      b):
    """Doc."""
    return """text
    that is data"""
'''
    assert code_lines(source) == 5
    assert code_lines("") == 0


@pytest.mark.parametrize(
    "source",
    [
        "x = []",
        "x: dict[str, int] = {}",
        "x = {y for y in z}",
        "x = collections.defaultdict(list)",
        "class A:\n    x = []",
        "def f():\n    global x\n    x = 1",
        "@functools.lru_cache(maxsize=None)\ndef f(): pass",
        "@cache\ndef f(): pass",
        "@cache\ndef f() -> list[int]: pass",
        "X = {}\ndef f(): X['a'] = 1",
        "X = []\ndef f(): X.append(1)",
        "X = []\ndef f():\n    for X[0] in y: pass",
        "X = {}\ndef f(): del X['a']",
    ],
)
def test_the_finder_of_shared_state_finds_it(source: str) -> None:
    assert len(shared_state(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x = ()",
        "X = {'a': 1}\nprint(X['a'])",
        "def f():\n    x = []\n    x.append(1)",
        "__all__ = ['a']",
        "@functools.lru_cache(maxsize=2)\ndef f() -> tuple[int, ...]: pass",
    ],
)
def test_the_finder_of_shared_state_leaves_the_rest_alone(source: str) -> None:
    assert shared_state(source) == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import environ as e", "os.getenv('A')", "environ.get('A')"]
)
def test_the_finder_of_environment_reads_finds_them(source: str) -> None:
    assert environment_reads(source)


# The claims


def test_the_order_of_imports_names_each_file_of_the_kernel_once() -> None:
    files = [file.stem for file in KERNEL.glob("*.py") if file.stem != "__init__"]
    assert sorted(import_order()) == sorted(files)


@pytest.mark.parametrize("file", sources(KERNEL), ids=name_of)
def test_a_file_of_the_kernel_imports_only_from_those_above_it(file: Path) -> None:
    order = import_order()
    above = order[: order.index(file.stem)] if file.stem != "__init__" else []
    allowed = {f"femto_core.{name}" for name in above}
    assert {name for name in imported(file.read_text()) if name.startswith("femto_core")} <= allowed


@pytest.mark.parametrize("file", sources(KERNEL), ids=name_of)
def test_the_kernel_imports_no_other_package_of_femto_but_its_operators(file: Path) -> None:
    assert {name.split(".")[0] for name in imported(file.read_text())} <= {"femto_core", "femto_ops"}


@pytest.mark.parametrize("folder", sorted((ROOT / "plugins").glob("*/")), ids=name_of)
def test_a_plugin_imports_no_other_plugin(folder: Path) -> None:
    others = {other.name for other in (ROOT / "plugins").glob("*/")} - {folder.name}
    for file in sources(folder):
        assert {name.split(".")[0] for name in imported(file.read_text())}.isdisjoint(others), name_of(file)


@pytest.mark.parametrize("folder", sorted((ROOT / "plugins").glob("*/")), ids=name_of)
def test_a_plugin_imports_no_built_in_one_but_the_library_of_femto_data(folder: Path) -> None:
    for file in sources(folder):
        for name in imported(file.read_text()):
            package, _, module = name.partition(".")
            if package in ("femto_data", "femto_report", "femto_checkpoint"):
                assert folder.name == "femto_sft", name_of(file)
                assert package == "femto_data", name_of(file)
                assert module not in ("", "plugin"), name_of(file)


@pytest.mark.parametrize("file", sources(ROOT / "femto_checkpoint", ROOT / "femto_report"), ids=name_of)
def test_a_built_in_plugin_imports_no_other_but_the_library_of_femto_data(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    others = {"femto_data", "femto_report", "femto_checkpoint"} - {package}
    found = {name for name in imported(file.read_text()) if name.split(".")[0] in others}
    library = {name for name in found if name.startswith("femto_data.") and name != "femto_data.plugin"}
    assert found <= library


@pytest.mark.parametrize("file", sources(ROOT / "femto_data"), ids=name_of)
def test_of_femto_data_only_the_plugin_has_hooks_and_nothing_else_imports_it(file: Path) -> None:
    names = imported(file.read_text())
    assert ("femto_core.hookspecs" in names) == (file.stem == "plugin")
    assert "femto_data.plugin" not in names


@pytest.mark.parametrize("file", shipped(), ids=name_of)
def test_no_file_is_longer_than_one_sitting(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_kernel_stays_small() -> None:
    counted = {name_of(file): code_lines(file.read_text(encoding="utf-8")) for file in sources(KERNEL)}
    assert 0 < sum(counted.values()) < MOST_KERNEL_CODE, counted


def plugin_names() -> set[str]:
    """Packages and entry names; femto_precision is a hook as well, and may be named as one."""
    known = {
        "femto_tp",
        "femto_pp",
        "femto_zero",
        "femto_sac",
        "femto_precision",
        "femto_sft",
        "zero1",
        "zero2",
        "zero3",
    }
    return (known | {folder.name for folder in (ROOT / "plugins").glob("*/")}) - set(hook_names())


@pytest.mark.parametrize("file", sources(KERNEL), ids=name_of)
def test_the_kernel_knows_no_plugin_by_name(file: Path) -> None:
    code = without_prose(file.read_text(encoding="utf-8"))
    assert re.findall(rf"\b(?:{'|'.join(plugin_names())})\b", code) == []
    entries = {"tp", "pp", "sac", "bf16", "sft", "zero"}
    texts = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert texts.isdisjoint(entries)


@pytest.mark.parametrize("file", shipped(), ids=name_of)
def test_only_the_command_line_and_the_mesh_read_the_environment(file: Path) -> None:
    reads = environment_reads(file.read_text(encoding="utf-8"))
    assert bool(reads) == (name_of(file) in ("femto_core/cli.py", "femto_core/launch.py")), reads


@pytest.mark.parametrize("file", sources(KERNEL), ids=name_of)
def test_the_kernel_shares_nothing_that_changes(file: Path) -> None:
    assert shared_state(file.read_text(encoding="utf-8")) == []


LIGHT = """
import sys
from femto_core.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    loaded = [name for name in ("torch", "transformers", "datasets", "numpy", "matplotlib") if name in sys.modules]
    print(end.code, *loaded, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["plugins"],
        ["plugins", "--json"],
        ["train", "--help"],
        ["--help"],
        ["hooks"],
        ["preprocess", "--help"],
        ["data-inspect", "--help"],
        ["export", "--help"],
        ["checkpoint", "--help"],
        ["hooks", "--help"],
        ["plugins", "--help"],
        ["memory", "--help"],
        ["verify", "--help"],
        ["sft-inspect", "--plugins", "sft", "--help"],
        ["pp-draw", "--plugins", "pp", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_commands_that_only_talk_load_no_heavy_library(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIGHT, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stderr == "0\n"
    assert done.stdout


def test_femto_plugins_answers_in_under_a_second(tmp_path: Path) -> None:
    seconds = []
    for _ in range(5):  # CPU time, and the best of five: a busy machine is not femto's fault
        before = os.times()
        subprocess.run([sys.executable, "-m", "femto_core", "plugins"], check=True, capture_output=True, cwd=tmp_path)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1
