"""Text that every machine has: the running Python's own standard library, as a dataset."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from femto_data.config import PreprocessConfig
from femto_data.once import made_once
from femto_data.preprocess import preprocess

_VERSION = (
    2  # raised whenever the choice of files or the way they are cut changes, so that no old cache is taken for new
)
_MOST_BYTES = 12 * 2**20  # keeps the first run short on Pythons with a larger library
# Tests repeat themselves, the tables of encodings are numbers, and site-packages is not the standard library.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
)


def standard_library_dataset(cache: Path, *, seq_len: int, vocab_size: int) -> Path:
    """Return the dataset directory of the standard library's sources below `cache`, made by the first call.

    Rows have `seq_len` + 1 tokens; the tokenizer has up to `vocab_size` and is trained on the same sources; 2 % of the
    files are held out. Processes that call at once wait for the one that makes it. Raises what `preprocess` raises.
    """
    directory = cache / f"stdlib-py{platform.python_version()}-seq{seq_len}-vocab{vocab_size}-v{_VERSION}"

    def make(output: Path) -> None:
        files = standard_library_sources(Path(sysconfig.get_paths()["stdlib"]))
        config = PreprocessConfig(
            input=tuple(map(str, files)), seq_len=seq_len, output=str(output), vocab_size=vocab_size, held_out=0.02
        )
        preprocess(config, quiet=True)

    return made_once(directory, "data.cache", make)


def standard_library_sources(root: Path) -> list[Path]:
    """Return the .py files below `root`, sorted, up to 12 MiB, without those that are not UTF-8."""
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
