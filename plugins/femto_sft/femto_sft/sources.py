"""Rows out of files and Hugging Face datasets, one after another, each with its file and line.

Local JSON and Parquet files are read here rather than by the datasets library: that one makes all rows of a file fit
one schema, and cannot tell which line is wrong.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from femto_core.errors import UserError
from femto_sft.conversation import Problem

JSON = tuple(kind + packed for packed in ("", ".gz", ".zst") for kind in (".jsonl", ".ndjson", ".json"))
KNOWN = (*JSON, ".parquet")
_SAVED = ("dataset_info.json", "state.json")  # what datasets' save_to_disk writes
_HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?"


@attrs.frozen
class Line:
    """One row, or what is wrong with it; `row` is None on a blank line."""

    where: str
    row: Mapping[str, Any] | Problem | None


@attrs.frozen
class Source:
    """A file, or a dataset that the datasets library reads."""

    name: str
    digest: str
    """Changes whenever the contents do."""
    file: Path | None = None
    dataset: Any = None

    def lines(self) -> Iterator[Line]:
        """Yield the rows in order. Raises `UserError` for a file that ends too early, or is in no known format."""
        if self.file is None:
            for number, row in enumerate(self.dataset, 1):
                yield Line(f"{self.name}, row {number}", row)
        elif self.file.name.lower().endswith(".parquet"):
            yield from _parquet(self.file)
        else:
            yield from _json(self.file)


def find_sources(paths: tuple[str, ...], split: str) -> list[Source]:
    """Return what `paths` name, in order; a directory's files are sorted. Raises `UserError` for what is not read."""
    return [source for path in paths for source in _find(path, split)]


def _find(name: str, split: str) -> list[Source]:
    path = Path(name)
    if path.is_file():
        if not name.lower().endswith(KNOWN):
            raise UserError(f"sft.path: {name} is in a format that is not read; {', '.join(KNOWN)} are")
        return [_file(path)]
    if path.is_dir():
        if any((path / marker).is_file() for marker in _SAVED):
            return [_saved(path, split)]
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(KNOWN))
        if not files:
            raise UserError(f"sft.path: directory {name} has no file that ends in one of {', '.join(KNOWN)}")
        return [_file(file) for file in files]
    if name.lower().endswith(KNOWN) or not re.fullmatch(_HUB_NAME, name):
        raise UserError(f"sft.path: {name} does not exist; check its spelling")
    return [_hub(name, split)]


def _file(path: Path) -> Source:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
    except OSError as error:
        raise UserError(f"sft.path: {path} cannot be read ({error.strerror}); make it readable") from None
    return Source(str(path), digest.hexdigest(), file=path)


def _saved(path: Path, split: str) -> Source:
    import datasets  # takes a second to load, and most runs read files

    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"sft.path: the dataset saved in {path} cannot be read: {_words(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise UserError(f"sft.split = {split!r} is none of the splits of {path}: {', '.join(dataset)}")
        dataset = dataset[split]
    return Source(str(path), f"{dataset._fingerprint}", dataset=dataset)


def _hub(name: str, split: str) -> Source:
    import datasets

    path, _, subset = name.partition(":")
    try:
        dataset = datasets.load_dataset(path, subset or None, split=split)
    except Exception as error:
        raise UserError(
            f"sft.path: {name} is neither a file nor a directory, and the Hugging Face dataset of that name cannot be "
            f"read ({_words(error)}); check the spelling and the network"
        ) from error
    return Source(name, f"{dataset._fingerprint}", dataset=dataset)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    suffix = file.suffix.lower()
    if suffix == ".zst":
        with pa.input_stream(str(file), compression="zstd") as raw, io.BufferedReader(raw, 2**18) as stream:
            yield stream
    else:
        with gzip.open(file, "rb") if suffix == ".gz" else file.open("rb") as stream:
            yield stream  # type: ignore[misc]


def _json(file: Path) -> Iterator[Line]:
    """Yield the rows of an object a line; or, where the file begins with a bracket, the items of one list."""
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, 1):
                if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                    yield from _list(file, line + stream.read())
                    return
                where = f"{file}, line {number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield Line(where, _object(json.loads(text)) if text.strip() else None)
                except UnicodeDecodeError as error:
                    yield Line(where, Problem(f"byte {error.start + 1} is not valid UTF-8"))
                except (ValueError, RecursionError) as error:
                    extra = "Extra data" in str(error)
                    yield Line(where, Problem("trailing data after its object" if extra else f"no JSON ({error})"))
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{file} cannot be read to its end ({error}); copy it again") from error


def _list(file: Path, data: bytes) -> Iterator[Line]:
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not valid UTF-8; mend it, or write an object a line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} begins as a list, but is no JSON ({error}); mend it, or write an object a line"
        ) from None
    for number, item in enumerate(items, 1):
        yield Line(f"{file}, item {number}", _object(item))


def _object(value: object) -> Mapping[str, Any] | Problem:
    return value if isinstance(value, dict) else Problem(f"holds a {type(value).__name__}, not an object")


def _parquet(file: Path) -> Iterator[Line]:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Line(f"{file}, row {number}", row)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}); copy it again") from error


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
