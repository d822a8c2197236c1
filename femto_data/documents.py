"""Documents out of files, directories and Hugging Face datasets: one string after another, in order.

Local files are read here rather than by the datasets library, so that what is wrong with one is told by file and line.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from femto_core.errors import UserError
from femto_data.config import PreprocessConfig

_JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_TEXT = (".txt", ".md", ".py")


def find_sources(config: PreprocessConfig) -> list[Path | str]:
    """Return the files to read, a directory's own sorted by path, and names of Hugging Face datasets, as strings."""
    sources: list[Path | str] = []
    for name in config.input:
        path = Path(name)
        if path.is_dir():
            try:
                found = sorted(file for file in path.glob(config.glob) if file.is_file())
            except (ValueError, NotImplementedError) as error:
                raise UserError(f"glob {config.glob!r} is no pattern for files below a directory: {error}") from error
            if not found:
                raise UserError(
                    f"directory {name} has no file that matches {config.glob!r}; give another pattern with --glob"
                )
            sources += found
        elif path.is_file():
            if not path.name.lower().endswith((*_JSON_LINES, ".parquet", *_TEXT)):
                raise UserError(
                    f"{name} is in a format that is not read; {', '.join((*_JSON_LINES, '.parquet', *_TEXT))} are, and "
                    f"any plain text inside a directory, through --glob"
                )
            sources.append(path)
        elif name.lower().endswith((*_JSON_LINES, ".parquet", *_TEXT)) or not re.fullmatch(
            r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?", name
        ):
            raise UserError(f"input {name} does not exist; check its spelling")
        else:
            sources.append(name)
    return sources


def read_documents(sources: list[Path | str], text_key: str, cache: Path) -> datasets.Dataset:
    """Return the documents of all sources in order, one column `text`, on disk under `cache`."""

    def documents() -> Iterator[dict[str, str]]:
        found = False
        for source in sources:
            for text in _read(source, text_key):
                found = True
                yield {"text": text}
        if not found:
            raise UserError(f"{', '.join(map(str, sources[:3]))} holds no document; give input with text in it")

    # large_string: a batch of documents may pass the 2 GiB that string's offsets reach.
    features = datasets.Features({"text": datasets.Value("large_string")})
    try:
        return datasets.Dataset.from_generator(
            documents, features=features, cache_dir=str(cache), writer_batch_size=256
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _read(source: Path | str, text_key: str) -> Iterator[str]:
    if isinstance(source, str):
        return _read_hub(source, text_key)
    name = source.name.lower()
    if name.endswith(_JSON_LINES):
        return _read_json_lines(source, text_key)
    return _read_parquet(source, text_key) if name.endswith(".parquet") else _read_text(source)


def _read_json_lines(file: Path, text_key: str) -> Iterator[str]:
    """Yield the text of every line's object; a blank line is skipped, anything else that is no object is refused."""
    try:
        with gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                where = f"{file}, line {number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        yield _text_of(json.loads(text), text_key, where)
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{where}: byte {error.start + 1} is not valid UTF-8; mend or remove the line"
                    ) from error
                except (ValueError, RecursionError) as error:
                    what = (
                        "trailing data after its object" if "Extra data" in str(error) else f"not valid JSON ({error})"
                    )
                    raise UserError(f"{where}: {what}; every line must hold one JSON object") from error
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{file} cannot be read to its end ({error}); copy it again") from error


def _read_parquet(file: Path, text_key: str) -> Iterator[str]:
    try:
        with pq.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if text_key not in columns:
                raise UserError(_no_key(str(file), text_key, columns))
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _text_of({text_key: value}, text_key, f"{file}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}); copy it again") from error


def _read_text(file: Path) -> Iterator[str]:
    """Yield the whole file, its line endings untouched; a byte order mark is not text."""
    try:
        yield file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{file}, line {line}: not valid UTF-8; mend the file or leave it out") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); make it readable or leave it out") from error


def _read_hub(name: str, text_key: str) -> Iterator[str]:
    """Yield the documents of a Hugging Face dataset as they arrive, so that the user's cache does not fill."""
    path, _, subset = name.partition(":")
    try:
        rows = datasets.load_dataset(path, subset or None, split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield _text_of(row, text_key, f"{name}, row {number}")
    except (OSError, ValueError) as error:
        raise UserError(
            f"input {name} is neither a file nor a directory, and the Hugging Face dataset of that name cannot be "
            f"reached or read ({' '.join(str(error).split())}); check the spelling and the network"
        ) from error


def _text_of(row: object, text_key: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UserError(
            f"{where}: holds a {type(row).__name__}, not a JSON object; every line must hold one JSON object"
        )
    if text_key not in row:
        raise UserError(_no_key(where, text_key, list(row)))
    text = row[text_key]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: {text_key!r} holds {json.dumps(text, default=str)[:40]}, not text; mend it or take another"
        )
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise UserError(
            f"{where}: {text_key!r} holds half of a surrogate pair, which no UTF-8 text can; mend or remove it"
        )
    return text


def _no_key(where: str, text_key: str, keys: list[str]) -> str:
    return f"{where}: no {text_key!r} among the keys {', '.join(map(repr, keys))}; name the text's by --text-key"
