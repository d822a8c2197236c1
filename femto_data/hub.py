"""Hugging Face datasets: the current commit of a name, and a local copy of its documents for preprocessing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq

from femto_core.errors import UserError
from femto_data.atomic import atomic_path
from femto_data.documents import text_of
from femto_data.workspace import Interrupted


def hub_revision(name: str) -> str:
    """Return the current commit of the dataset `name` (NAME or NAME:CONFIG)."""
    try:
        return str(huggingface_hub.dataset_info(name.partition(":")[0]).sha)
    except Exception as error:
        raise _unreachable(name, error) from error


def fetch(name: str, revision: str, text_key: str, file: Path) -> None:
    """Write the documents of the train split of `name` at `revision` to the Parquet file `file`, atomically.

    Documents are streamed: neither memory nor the user's cache fills up. An existing `file` is kept as it is.
    """
    if file.exists():
        return
    schema = pa.schema({text_key: pa.large_string()})
    with atomic_path(file) as partial, pq.ParquetWriter(partial, schema) as writer:
        batch: list[str] = []
        size = 0
        for text in _stream(name, revision, text_key):
            batch.append(text)
            size += len(text)
            if size >= 2**20 or len(batch) == 1024:
                writer.write_table(pa.table({text_key: batch}, schema))
                batch, size = [], 0
        writer.write_table(pa.table({text_key: batch}, schema))


def _stream(name: str, revision: str, text_key: str) -> Iterator[str]:
    path, _, subset = name.partition(":")
    try:
        rows = datasets.load_dataset(path, subset or None, split="train", streaming=True, revision=revision)
        for number, row in enumerate(rows, 1):
            yield text_of(row, text_key, f"{name}, row {number}")
    except (OSError, ValueError) as error:
        raise Interrupted(f"{_unreachable(name, error)}; run the command again to resume") from error


def _unreachable(name: str, error: Exception) -> UserError:
    return UserError(
        f"input {name} is neither a file nor a directory, and the Hugging Face dataset of that name cannot be reached "
        f"or read ({' '.join(str(error).split())}); check the spelling and the network"
    )
