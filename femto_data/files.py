"""Input files: formats by suffix, digests, and transparent .gz/.zst reading."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq

from femto_core.errors import UserError

JSON_LINES = tuple(kind + packed for packed in ("", ".gz", ".zst") for kind in (".jsonl", ".ndjson", ".json"))
PARQUET = ".parquet"
_HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?"
_BLOCK = 2**20  # bytes that are read at once


@attrs.frozen
class SourceFile:
    """An input file, as it was when its digest was computed."""

    path: Path
    size: int
    modified: int
    """Time of the last modification, in nanoseconds."""
    sha256: str

    def check_unchanged(self) -> None:
        """Raise UserError if the file was modified since its digest was computed."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise UserError(
                f"{self.path} disappeared while it was read ({error.strerror}); run the command again"
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.modified):
            raise UserError(
                f"{self.path} was changed while it was read; run the command again when nothing writes to the file"
            )


def digest_file(path: Path) -> SourceFile:
    """Return the file with the SHA-256 of its contents. Raises UserError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            before = os.fstat(stream.fileno())
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable or leave it out") from error
    return SourceFile(path, before.st_size, before.st_mtime_ns, digest.hexdigest())


def may_be_on_the_hub(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether `name` has the form of a Hugging Face dataset (NAME or NAME:CONFIG), and none of the file `suffixes`."""
    return not name.lower().endswith(suffixes) and re.fullmatch(_HUB_NAME, name) is not None


@contextlib.contextmanager
def open_packed(file: Path) -> Iterator[IO[bytes]]:
    """Open `file`, decompressed if it is .gz or .zst. Raises UserError if it cannot be read to its end."""
    suffix = file.suffix.lower()
    try:
        if suffix == ".zst":
            with pa.input_stream(str(file), compression="zstd") as raw, io.BufferedReader(raw, 2**18) as stream:
                yield stream
        else:
            with gzip.open(file, "rb") if suffix == ".gz" else file.open("rb") as stream:
                yield stream  # type: ignore[misc]
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{file} cannot be read to its end ({error}); copy it again") from error


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | str | None]]:
    """Yield (line number, object) for each line. A blank line gives None, any other mistake a sentence about it."""
    with open_packed(file) as stream:
        for number, line in enumerate(stream, 1):
            yield number, _object_in(line, "utf-8-sig" if number == 1 else "utf-8")


def _object_in(line: bytes, encoding: str) -> dict[str, Any] | str | None:
    try:
        text = line.decode(encoding)
        return json_object(json.loads(text)) if text.strip() else None
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not valid UTF-8"
    except (ValueError, RecursionError) as error:
        return "trailing data after its object" if "Extra data" in str(error) else f"not valid JSON ({error})"


def json_object(value: object) -> dict[str, Any] | str:
    """Return `value` if it is a JSON object, otherwise a sentence that says what it is."""
    return value if isinstance(value, dict) else f"holds a {type(value).__name__}, not a JSON object"


@contextlib.contextmanager
def open_parquet(file: Path) -> Iterator[pq.ParquetFile]:
    """Open `file` for reading page by page. Raises UserError if it cannot be read."""
    try:
        # Without buffer_size, pyarrow reads a whole column of a row group at once; one row group may be the whole file.
        with pq.ParquetFile(file, buffer_size=_BLOCK, pre_buffer=False) as table:
            yield table
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}); copy it again") from error
