"""The files of each input, with digests that change whenever their contents do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from femto_core.errors import UserError
from femto_data.config import PreprocessConfig
from femto_data.files import JSON_LINES, PARQUET, SourceFile, digest_file, may_be_on_the_hub

TEXT = (".txt", ".md", ".py")
_KNOWN = (*JSON_LINES, PARQUET, *TEXT)


@attrs.frozen
class InputSource:
    """One of the inputs: local files, or a Hugging Face dataset, which has no files until it is fetched."""

    name: str
    files: tuple[Path, ...]
    is_hub: bool = False


def find_sources(config: PreprocessConfig) -> list[InputSource]:
    """Return the sources that `config.input` names, in order; a directory's files are sorted by path.

    Files of an earlier output, or of a killed run beside it, are left out. Raises UserError for a file that two inputs
    name.
    """
    sources = [_find(name, config) for name in config.input]
    seen: dict[str, str] = {}
    for source in sources:
        for file in {str(file.resolve()) for file in source.files} or {source.name}:
            if file in seen:
                raise UserError(
                    f"--input names {file} twice ({seen[file]} and {source.name}); name it once, and use --weights to "
                    f"repeat an input"
                )
            seen[file] = source.name
    return sources


def _find(name: str, config: PreprocessConfig) -> InputSource:
    path = Path(name)
    if path.is_dir():
        return InputSource(name, _files_below(path, config))
    if path.is_file():
        if not path.name.lower().endswith(_KNOWN):
            raise UserError(
                f"{name} is in an unknown format; give {', '.join(_KNOWN)}, or a directory, whose plain text files of "
                f"any suffix --glob selects"
            )
        return InputSource(name, (path,))
    if not may_be_on_the_hub(name, _KNOWN):
        raise UserError(f"input {name} does not exist; check its spelling")
    return InputSource(name, (), is_hub=True)


def _files_below(directory: Path, config: PreprocessConfig) -> tuple[Path, ...]:
    output = Path(config.output).resolve()

    def is_ours(file: Path) -> bool:
        inside = file.resolve()
        return any(
            parent.parent == output.parent
            and (parent.name == output.name or parent.name.startswith(f".{output.name}."))
            for parent in inside.parents
        )

    try:
        found = sorted(file for file in directory.glob(config.glob) if file.is_file() and not is_ours(file))
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"glob {config.glob!r} is not a pattern for files below a directory: {error}") from error
    if not found:
        raise UserError(
            f"directory {directory} has no file that matches {config.glob!r}; give another pattern with --glob"
        )
    return tuple(found)


def digest_files(files: Sequence[Path], workers: int) -> list[SourceFile]:
    """Return each file with the SHA-256 of its contents; `workers` files are read at a time."""
    with ThreadPoolExecutor(workers) as threads:  # hashing and reading release the GIL
        return list(threads.map(digest_file, files))


def digest_of_digests(files: Sequence[SourceFile]) -> str:
    """Return one SHA-256 for the contents of `files` in their order; their names do not matter."""
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()


def write_source_list(groups: Sequence[tuple[str, Sequence[SourceFile]]], file: Path) -> None:
    """Write a JSON line with `input`, `file`, `bytes` and `sha256` for each file of each (input, files) in `groups`."""
    with file.open("w", encoding="utf-8") as stream:
        for name, files in groups:
            for one in files:
                entry = {"input": name, "file": str(one.path), "bytes": one.size, "sha256": one.sha256}
                stream.write(json.dumps(entry) + "\n")
