"""The running Python's standard library as a dataset: text that every machine has."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from femto_data.build_lock import build_once
from femto_data.config import PreprocessConfig
from femto_data.preprocess import preprocess

_VERSION = 3  # raised whenever equal arguments come to mean another dataset, so that an older cache is not used
_MOST_BYTES = 12 * 2**20  # keeps the first run short on Pythons with a larger library
# Tests are repetitive, tables of encodings are mostly numbers, and site-packages is not the standard library.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
)


def standard_library_dataset(cache: Path, *, seq_len: int, vocab_size: int) -> Path:
    """Return the dataset directory of the standard library's sources, below `cache`; the first call makes it.

    Rows have `seq_len` + 1 tokens. The tokenizer is trained on the same sources and has up to `vocab_size` tokens. 2 %
    of the files are held out. Processes that call at the same time wait for the one that builds. Raises what
    `preprocess` raises.
    """
    directory = cache / f"stdlib-py{platform.python_version()}-seq{seq_len}-vocab{vocab_size}-v{_VERSION}"

    def make(output: Path) -> None:
        files = standard_library_sources(Path(sysconfig.get_paths()["stdlib"]))
        config = PreprocessConfig(
            input=tuple(map(str, files)), seq_len=seq_len, output=str(output), vocab_size=vocab_size, held_out=0.02
        )
        preprocess(config, quiet=True)

    return build_once(directory, "corpus.cache", make)


def standard_library_sources(root: Path) -> list[Path]:
    """Return the .py files below `root`, sorted, up to 12 MiB in all; files that are not UTF-8 are left out."""
    chosen = []
    left = _MOST_BYTES
    for file in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            source = file.read_bytes()
            try:
                source.decode()
            except UnicodeDecodeError:
                continue
            left -= len(source)
            if left < 0:
                break
            chosen.append(file)
    return chosen
