"""Rows of files and Hugging Face datasets, one after another, each with its place.

Local JSON and Parquet files are read here rather than by the datasets library, which makes all rows of a file fit one
schema, and cannot tell which line is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from femto_core.errors import UserError
from femto_data.files import (
    JSON_LINES,
    PARQUET,
    SourceFile,
    digest_file,
    json_lines,
    json_object,
    may_be_on_the_hub,
    open_packed,
    open_parquet,
)
from femto_sft.conversation import Problem
from femto_sft.section import SFTSection

KNOWN = (*JSON_LINES, PARQUET)
_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")  # files that datasets' save_to_disk writes
_TOGETHER = 256  # rows of a Parquet file that are read at once
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@attrs.frozen
class Line:
    """One row, or the problem with it; `row` is None for a blank line."""

    place: str
    """Place in the source, such as "line 3"."""
    row: Mapping[str, Any] | Problem | None


@attrs.frozen
class ConversationSource:
    """A local file, or a dataset that the datasets library reads."""

    name: str
    digest: str
    """Digest of the contents."""
    file: SourceFile | None = None
    dataset: Any = None

    def lines(self) -> Iterator[Line]:
        """Yield the rows in order. Raises `UserError` for a file that is truncated or cannot be parsed as a whole."""
        if self.file is None:
            for number, row in enumerate(self.dataset, 1):
                yield Line(f"row {number}", row)
        elif self.file.path.name.lower().endswith(PARQUET):
            yield from _parquet(self.file.path)
        elif _begins_as_list(self.file.path):
            yield from _list(self.file.path)
        else:
            for number, found in json_lines(self.file.path):
                yield Line(f"line {number}", _row(found))

    def check_unchanged(self) -> None:
        """Raise `UserError` if the file was modified since its digest was computed."""
        if self.file is not None:
            self.file.check_unchanged()


def find_sources(paths: tuple[str, ...], split: str) -> list[ConversationSource]:
    """Return the sources that `paths` name, in order; a directory's files are sorted.

    Raises `UserError` for a path that is missing or in an unknown format, and for a dataset that cannot be read.
    """
    return [source for path in paths for source in _find(path, split)]


def _find(name: str, split: str) -> list[ConversationSource]:
    path = Path(name)
    if path.is_file():
        if not name.lower().endswith(KNOWN):
            raise UserError(f"sft.path: {name} is in an unknown format; give {', '.join(KNOWN)}")
        return [_file(path)]
    if path.is_dir():
        if any((path / marker).is_file() for marker in _SAVED):
            return [_saved(path, split)]
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(KNOWN))
        if not files:
            raise UserError(f"sft.path: directory {name} has no file that ends in one of {', '.join(KNOWN)}")
        return [_file(file) for file in files]
    if not may_be_on_the_hub(name, KNOWN):
        raise UserError(f"sft.path: {name} does not exist; check its spelling")
    return [_hub(name, split)]


def _file(path: Path) -> ConversationSource:
    file = digest_file(path)
    return ConversationSource(str(path), file.sha256, file=file)


def _saved(path: Path, split: str) -> ConversationSource:
    import datasets  # takes a second to load, and most runs read files

    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"sft.path: the dataset saved in {path} cannot be read: {_words(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UserError(f"sft.split = {split!r} is none of the splits of {path}: {', '.join(dataset)}")
        dataset = dataset[split]
    elif split not in (SFTSection().split, str(dataset.split)):
        raise UserError(f"sft.split = {split!r}, but the dataset saved in {path} has no splits; leave sft.split out")
    return ConversationSource(str(path), f"{dataset._fingerprint}", dataset=dataset)


def _hub(name: str, split: str) -> ConversationSource:
    import datasets

    path, _, subset = name.partition(":")
    try:
        dataset = datasets.load_dataset(path, subset or None, split=split)
    except Exception as error:
        raise UserError(
            f"sft.path: {name} is neither a file nor a directory, and the Hugging Face dataset of that name cannot be "
            f"read ({_words(error)}); check the spelling and the network"
        ) from error
    return ConversationSource(name, f"{dataset._fingerprint}", dataset=dataset)


def _begins_as_list(file: Path) -> bool:
    """Whether `file` begins with a bracket, so that its rows are the items of one list."""
    with open_packed(file) as stream:
        lines = (line.removeprefix(_BYTE_ORDER_MARK).lstrip() for line in stream)
        return next((line for line in lines if line), b"").startswith(b"[")


def _list(file: Path) -> Iterator[Line]:
    with open_packed(file) as stream:
        data = stream.read()
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not valid UTF-8; correct it, or write one object per line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} begins as a list, but is not valid JSON ({error}); correct it, or write one object per line"
        ) from None
    for number, item in enumerate(items, 1):
        yield Line(f"item {number}", _row(json_object(item)))


def _parquet(file: Path) -> Iterator[Line]:
    number = 0
    with open_parquet(file) as table:
        for batch in table.iter_batches(batch_size=_TOGETHER):
            for row in batch.to_pylist():
                number += 1
                yield Line(f"row {number}", row)


def _row(found: dict[str, Any] | str | None) -> Mapping[str, Any] | Problem | None:
    return Problem(found) if isinstance(found, str) else found


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
