"""What a dataset directory says of itself: its `manifest.json`, and `sources.jsonl` with a line for each file read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from femto_core.errors import UserError

FORMAT = "femto-dataset-2"
NAME = "manifest.json"
SOURCES_NAME = "sources.jsonl"


@attrs.frozen(kw_only=True)
class RowsFile:
    """A file of rows, as it was when the dataset was made."""

    name: str
    rows: int
    bytes: int
    """Size of the whole file."""
    id: str
    """Digest of the rows, which the file's own header repeats: how a file from another dataset is told apart."""


@attrs.frozen(kw_only=True)
class SourceCounts:
    """What one of the inputs gave."""

    name: str
    files: int
    bytes: int
    """Size of those files as they lie on disk."""
    sha256: str
    """Digest of the files' own digests in the order of reading; sources.jsonl has each file's."""
    revision: str
    """Commit of a Hugging Face dataset; empty for files."""
    weight: float | None
    """Share of the training tokens that was asked for; None: every document once."""
    documents: int
    """Documents with at least one token, held-out ones included."""
    empty_documents: int
    """Documents skipped because they hold no token, or nothing but white space."""
    tokens: int
    """Tokens of these documents, one EOS each included."""
    held_out_documents: int
    held_out_tokens: int
    train_documents: int
    """Documents written for training, one that is taken twice counted twice."""
    train_tokens: int
    """Their tokens."""


@attrs.frozen(kw_only=True)
class Manifest:
    """What a dataset directory holds; its `manifest.json`."""

    sources: tuple[SourceCounts, ...]
    documents: int
    """Documents with at least one token, held-out ones included."""
    empty_documents: int
    """Documents skipped because they hold no token, or nothing but white space."""
    tokens: int
    """Tokens of all documents, one EOS each included; before any weights."""
    train_tokens: int
    """Tokens of the training stream; after weights."""
    held_out_tokens: int
    rows_train: int
    rows_held_out: int
    dropped_tokens: int
    """Tokens at the ends of the two streams that fill no row."""
    seq_len: int
    vocab_size: int
    tokenizer: str
    """The tokenizer's fingerprint."""
    held_out: float
    seed: int
    files: tuple[RowsFile, ...]
    format: str = FORMAT


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `manifest` into `directory`."""
    (directory / NAME).write_text(json.dumps(attrs.asdict(manifest), indent=2) + "\n", encoding="utf-8")


def is_dataset(directory: Path) -> bool:
    """Whether `directory` holds a dataset of this or an earlier format, and may be replaced by another."""
    try:
        found = json.loads((directory / NAME).read_bytes())["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(found, str) and found.startswith("femto-dataset-")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest in `directory` as plain values. Raises UserError for one that is missing or foreign."""
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
    """Refuse a file of rows that is not the one the manifest beside it was written with; without a manifest, accept.

    Compares the size, the tokenizer and the digest in the file's own header, so that opening reads no rows.
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
