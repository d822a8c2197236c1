"""`femto data-inspect`: the manifest's counts, and rows as text with the documents' ends marked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from femto_core.errors import UserError
from femto_data.config import InspectConfig
from femto_data.dataset import PackedDataset
from femto_data.manifest import read_manifest
from femto_data.tokenizer import load_tokenizer

_END = "[end of document]"
_COUNTS = ("documents", "empty_documents", "tokens", "train_tokens", "held_out_tokens", "rows_train", "rows_held_out")
_SOURCES = 12  # most sources shown; a shell pattern may have named hundreds
_MORE = ("dropped_tokens", "seq_len", "vocab_size", "tokenizer")


def describe(config: InspectConfig) -> Iterator[str]:
    """Yield the lines to show. Raises UserError if the dataset is damaged, or has no such split or row."""
    directory = Path(config.directory)
    manifest = read_manifest(directory)
    file = directory / f"{config.split}.safetensors"
    if config.split == "held_out" and not manifest["rows_held_out"]:
        raise UserError(f"{directory} has no held-out rows; femto preprocess --held-out SHARE makes some")
    dataset = PackedDataset(file)
    for row in config.rows:
        if not 0 <= row < len(dataset):
            raise UserError(f"there is no row {row}: {file} has rows 0 to {len(dataset) - 1}")
    yield from _counts(manifest)
    if config.check:
        for entry in manifest["files"]:
            PackedDataset(directory / entry["name"]).check_rows()
            yield f"{entry['name']}: all {entry['rows']} rows match their digest"
    if config.rows:
        tokenizer = load_tokenizer(str(dataset.tokenizer_path))
        for row in config.rows:
            yield ""
            yield f"row {row} of {config.split} (0 to {len(dataset) - 1}), {dataset.seq_len} tokens and the next:"
            ids = dataset[row].tolist()
            for document, ended in _documents(ids, dataset.eos_id):
                text = str(tokenizer.decode(document))
                # str.splitlines would hide line ends other than "\n".
                yield from (f"  | {_visible(line)}" for line in text.split("\n") if document)
                if ended:
                    yield f"  {_END}"


def _counts(manifest: dict[str, Any]) -> Iterator[str]:
    for name in (*_COUNTS, *_MORE):
        yield f"{name.replace('_', ' '):<16} {manifest[name]}"
    for source in manifest["sources"][:_SOURCES]:
        weight = "" if source["weight"] is None else f"weight {source['weight']:.4g}, "
        share = source["train_tokens"] / max(1, manifest["train_tokens"])
        yield (
            f"source {source['name']}: {weight}{source['documents']} documents, {source['empty_documents']} empty, "
            f"{source['tokens']} tokens; in training {source['train_documents']} documents, "
            f"{source['train_tokens']} tokens, {share:.1%}"
        )
    if len(manifest["sources"]) > _SOURCES:
        yield f"and {len(manifest['sources']) - _SOURCES} more sources, in manifest.json"


def _documents(ids: list[int], eos_id: int) -> Iterator[tuple[list[int], bool]]:
    """Yield (ids without EOS, whether the document ends in this row) for each document in a row."""
    document: list[int] = []
    for token in ids:
        if token == eos_id:
            yield document, True
            document = []
        else:
            document.append(token)
    if document:
        yield document, False


def _visible(line: str) -> str:
    """Return `line` with control and invisible characters as escape sequences."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)
