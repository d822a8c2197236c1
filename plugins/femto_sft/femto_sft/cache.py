"""The cache of packed rows: built once, by the first process, under a digest of everything that decides them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import tokenizers
import transformers
import xxhash
from transformers import PreTrainedTokenizerBase

from femto_core.errors import UserError
from femto_data.build_lock import build_once
from femto_data.tokenizer import save_tokenizer, tokenizer_fingerprint, vocabulary_size
from femto_sft.encoder import Encoder, make_encoder
from femto_sft.filter_report import ConversationCounts
from femto_sft.prepare import Reader, encode_all, write_rows
from femto_sft.rows import GENERATION, MANIFEST, TOKENIZER, read_manifest
from femto_sft.section import SFTSection, day_of
from femto_sft.sources import ConversationSource, find_sources
from femto_sft.template import is_dated
from femto_sft.tokenizer import PLAIN, load_tokenizer

_VERSION = 3
"""Raised whenever equal settings give other rows, so that an older cache is not used."""


@attrs.frozen
class PackedRows:
    """Packed rows in the cache, and the sources of this run.

    The rows may have been built from other files with the same contents.
    """

    directory: Path
    names: tuple[str, ...]
    """Names of this run's sources."""


def packed_rows(section: SFTSection, *, seq_len: int, model: str) -> PackedRows:
    """Return the rows that `section` describes; the first call builds them.

    Processes that call at the same time wait for the one that builds, and read complete rows only. Raises `UserError`
    for unusable settings, tokenizers and data, and for files that change meanwhile.
    """
    tokenizer = load_tokenizer(section.tokenizer, section.template, model)
    sources = find_sources(section.path, section.split)
    key = cache_key(section, sources, tokenizer, seq_len)

    def make(directory: Path) -> None:
        make_rows(directory, section, sources, tokenizer, seq_len=seq_len, key=key)
        for source in sources:  # a changed file would no longer have the digest in the key
            source.check_unchanged()

    directory = build_once(Path(section.cache).expanduser() / key, "sft.cache", make)
    return PackedRows(directory, tuple(source.name for source in sources))


def cache_key(
    section: SFTSection, sources: list[ConversationSource], tokenizer: PreTrainedTokenizerBase, seq_len: int
) -> str:
    """Return a digest of everything that decides the rows; the files' names and places are not in it."""
    settings = attrs.asdict(section)
    for name in ("path", "split", "cache", "tokenizer", "template", "date"):
        del settings[name]
    decides = {
        "versions": [_VERSION, tokenizers.__version__, transformers.__version__],
        "settings": settings,
        "plain": section.template == PLAIN,
        "template": tokenizer.chat_template,
        "date": date_written(section, tokenizer),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "sources": [source.digest for source in sources],
        "seq_len": seq_len,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(decides, sort_keys=True).encode())


def date_written(section: SFTSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the date that the template may write, or nothing where it has no clock."""
    return str(day_of(section)) if section.template != PLAIN and is_dated(tokenizer) else ""


def make_rows(
    directory: Path,
    section: SFTSection,
    sources: list[ConversationSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    key: str,
) -> None:
    """Write rows, tokenizer and manifest into `directory`. Raises `UserError` if no row is left to train on."""
    counts = ConversationCounts()
    reader = Reader(sources, section.format, counts)
    encoder: Encoder = make_encoder(tokenizer, section)
    conversations = encode_all(reader.read(), encoder, counts, section)
    written = write_rows(conversations, directory, seq_len, section, counts)
    if not written.rows["train"]:
        left_out = counts.lines(section.overlong, [source.name for source in sources])
        reasons = "; ".join(left_out) or f"{counts.held_out:,} held out"
        raise UserError(
            f"nothing to train on: none of {counts.read:,} rows of {', '.join(section.path)} is left ({reasons})"
        )
    save_tokenizer(tokenizer, directory / TOKENIZER)
    if written.ends:  # an exported model ends its answers as the data does
        ends = json.dumps({"eos_token_id": written.ends}, indent=2)
        (directory / TOKENIZER / GENERATION).write_text(ends + "\n", encoding="utf-8")
    pad = tokenizer.pad_token_id
    manifest: dict[str, Any] = {
        "key": key,
        "seq_len": seq_len,
        "vocab_size": vocabulary_size(tokenizer),
        "pad_id": int(tokenizer.eos_token_id if pad is None else pad),
        "how": encoder.how,
        "packing": section.packing,
        "overlong": section.overlong,
        "train_on": section.train_on,
        "formats": reader.formats,
        "recognised": section.format == "auto",
        "unread": {"rows": dict(sorted(reader.unread.items())), "turns": dict(sorted(encoder.unread.items()))},
        "notes": dict(encoder.notes),
        "date": date_written(section, tokenizer),
        "counts": attrs.asdict(counts),
        **attrs.asdict(written),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def report(packed: PackedRows) -> list[str]:
    """Return the log lines about a run's rows: their sources, counts, packing, and what was left out."""
    manifest = read_manifest(packed.directory)
    counts = ConversationCounts(**manifest["counts"])
    by_keys = ", recognised by its keys" if manifest["recognised"] else ""
    kinds = zip(packed.names, manifest["formats"], strict=True)
    named = [f"{name} (format {kind}{by_keys})" for name, kind in kinds if kind]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    unread = [
        f"{key} ({number:,} {whose})" for whose, keys in manifest["unread"].items() for key, number in keys.items()
    ]
    ignored = f"; keys not read: {', '.join(unread)}" if unread else ""
    share = counts.trained_tokens / max(1, counts.tokens)
    of_all = f"{counts.trained_tokens:,} of {counts.tokens:,} tokens ({share:.1%}) are trained"
    trained = f"train_on {manifest['train_on']}: {of_all}"
    rows, fill = manifest["rows"], manifest["fill"]
    filled = f"{rows['train']:,} rows of {manifest['seq_len']}, {fill['train']:.2%} full"
    held_out = f"{counts.held_out:,} conversations held out in {rows['held_out']:,} rows"
    return [
        f"{counts.read:,} conversations of {', '.join(named[:3])}{more}{ignored}",
        f"{manifest['how']}; {trained}",
        f"packing {manifest['packing']}: {filled}; {held_out}",
        *([f"the chat template writes the date, {manifest['date']} (sft.date)"] if manifest["date"] else []),
        *(f"{note} ({number:,} turns)" for note, number in manifest["notes"].items()),
        *counts.lines(manifest["overlong"], packed.names),
    ]
