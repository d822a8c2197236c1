"""A dataset directory's `manifest.json`: counts, files and their digests. `sources.jsonl` lists every file read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from femto_core.errors import UserError

FORMAT = "femto-dataset-3"
NAME = "manifest.json"
SOURCES_NAME = "sources.jsonl"


@attrs.frozen(kw_only=True)
class RowsFile:
    """A file of rows, as it was when the dataset was written."""

    name: str
    rows: int
    bytes: int
    """Size of the whole file."""
    id: str
    """Digest of the rows. The file's header repeats it, so that a file from another dataset is detected."""


@attrs.frozen(kw_only=True)
class SourceCounts:
    """Documents and tokens of one input."""

    name: str
    files: int
    bytes: int
    """Size of the input's files on disk, compressed as they are."""
    sha256: str
    """Digest of the files' SHA-256 digests in the order of reading; sources.jsonl has one for each file."""
    revision: str
    """Commit of a Hugging Face dataset; empty for local files."""
    weight: float | None
    """Requested share of the training tokens; None if no weights were given."""
    documents: int
    """Documents with at least one token, including held-out documents."""
    empty_documents: int
    """Documents skipped because they have no token or only white space."""
    tokens: int
    """Tokens of these documents, including one EOS each."""
    held_out_documents: int
    held_out_tokens: int
    train_documents: int
    """Documents written for training; a document that is written twice counts twice."""
    train_tokens: int
    """Tokens written for training."""


@attrs.frozen(kw_only=True)
class Manifest:
    """The contents of `manifest.json`."""

    sources: tuple[SourceCounts, ...]
    documents: int
    """Documents with at least one token, including held-out documents."""
    empty_documents: int
    """Documents skipped because they have no token or only white space."""
    tokens: int
    """Tokens of all documents, including one EOS each, before weights are applied."""
    train_tokens: int
    """Tokens of the training stream, after weights are applied."""
    held_out_tokens: int
    rows_train: int
    rows_held_out: int
    dropped_tokens: int
    """Tokens at the ends of the two streams that fill no row."""
    seq_len: int
    vocab_size: int
    tokenizer: str
    """Fingerprint of the tokenizer."""
    held_out: float
    seed: int
    files: tuple[RowsFile, ...]
    format: str = FORMAT


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `manifest` into `directory`."""
    (directory / NAME).write_text(json.dumps(attrs.asdict(manifest), indent=2) + "\n", encoding="utf-8")


def is_dataset(directory: Path) -> bool:
    """Whether `directory` holds a dataset of this or an earlier format, which a new dataset may replace."""
    try:
        found = json.loads((directory / NAME).read_bytes())["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(found, str) and found.startswith("femto-dataset-")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest in `directory` as plain values. Raises UserError if it is missing or in another format."""
    file = directory / NAME
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; give a directory that `femto preprocess` wrote") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy it again or run `femto preprocess` again") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"{file} is no manifest in the format {FORMAT}; run `femto preprocess` again")
    return values


def check_belongs(file: Path, *, identity: str, tokenizer: str) -> None:
    """Refuse a file of rows that does not belong to the manifest beside it; accept a file without a manifest.

    Compares the size, the tokenizer and the digest in the file's header, without reading rows.
    """
    if not (file.parent / NAME).exists():
        return
    manifest = read_manifest(file.parent)
    again = "the two come from different runs: copy the whole directory again or run `femto preprocess` again"
    recorded = {entry["name"]: entry for entry in manifest["files"]}.get(file.name)
    if recorded is None:
        raise UserError(f"{file} is stale: the manifest beside it names no such file; {again}")
    size = file.stat().st_size
    if (size, identity) != (recorded["bytes"], recorded["id"]):
        raise UserError(
            f"{file} is stale: the manifest beside it belongs to a file of {recorded['bytes']} bytes with id "
            f"{recorded['id']}, and this one has {size} bytes and id {identity}; {again}"
        )
    if tokenizer != manifest["tokenizer"]:
        raise UserError(
            f"{file} is stale: its tokenizer is {tokenizer}, the manifest's is {manifest['tokenizer']}; {again}"
        )
