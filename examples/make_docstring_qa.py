"""Write questions and answers about the standard library, made from the docstrings in its sources.

    python examples/make_docstring_qa.py docstrings.jsonl

Each line is a conversation: "What does textwrap.dedent do?", and the function's own documentation. The sources are
parsed, not imported, so nothing runs, and equal versions of Python give equal files.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LONGEST = 600  # characters of an answer


def documented(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring) of the module's public functions, classes and methods."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                name = f"{prefix}.{node.name}"
                if text := ast.get_docstring(node):
                    yield name, text
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body, name)

    yield from visit(ast.parse(source).body, module)


def conversations(library: Path) -> Iterator[dict[str, object]]:
    """Yield a conversation for each docstring of the top-level modules of `library`, in the order of their names."""
    for name in sorted(sys.stdlib_module_names):
        files = [library / f"{name}.py", library / name / "__init__.py"]
        for file in (file for file in files if file.is_file() and not name.startswith("_")):
            for thing, text in documented(name, file.read_text(encoding="utf-8")):
                if 20 <= len(text) <= LONGEST:
                    turns = [
                        {"role": "user", "content": f"What does {thing} do?"},
                        {"role": "assistant", "content": text},
                    ]
                    yield {"messages": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON Lines file to write")
    output: Path = parser.parse_args().output
    lines = [json.dumps(line) + "\n" for line in conversations(Path(sysconfig.get_paths()["stdlib"]))]
    output.write_text("".join(lines), encoding="utf-8")
    print(f"{output}: {len(lines):,} conversations")


if __name__ == "__main__":
    main()
