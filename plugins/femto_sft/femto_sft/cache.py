"""Rows that are made once: by whichever process comes first, under a key of all that decides them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import xxhash
from filelock import FileLock

from femto_core.errors import UserError

# A library function of the core distribution, without hooks: what counts as the same tokenizer is said once.
from femto_data.dataset import tokenizer_fingerprint
from femto_sft.counts import Counts
from femto_sft.encoder import Encoder, make_encoder
from femto_sft.prepare import Reader, encode_all, write_rows
from femto_sft.rows import MANIFEST, TOKENIZER
from femto_sft.section import SFTSection
from femto_sft.sources import Source, find_sources
from femto_sft.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 1
"""Raised whenever equal settings come to mean other rows, so that no old cache is taken for new."""


def packed_rows(section: SFTSection, *, seq_len: int, model: str) -> Path:
    """Return the directory of the rows that `section` describes, made by the first call.

    Processes that call at once wait for the one that makes it; none of them reads what is not complete. Raises
    `UserError` for anything about settings, tokenizer or data that does not do.
    """
    tokenizer = load_tokenizer(section.tokenizer, section.template, model)
    sources = find_sources(section.path, section.split)
    key = cache_key(section, sources, tokenizer, seq_len)
    cache = Path(section.cache).expanduser()
    directory = cache / key
    lock = FileLock(cache / f"{key}.lock")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(f"sft.cache = {cache} cannot be written ({error.strerror}); name another directory") from None
    try:
        if not directory.is_dir():
            partial = cache / f"{key}.partial"  # under the lock, whatever is there was left by a run that was killed
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                make_rows(partial, section, sources, tokenizer, seq_len=seq_len, key=key)
                for file in partial.rglob("*"):
                    _sync(file)
                os.replace(partial, directory)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    finally:
        lock.release()
    return directory


def cache_key(section: SFTSection, sources: list[Source], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> str:
    """Return a digest of everything that decides the rows, and of nothing else: not of where files lie."""
    settings = attrs.asdict(section)
    for name in ("path", "split", "cache", "tokenizer", "template"):
        del settings[name]
    decides = {
        "version": _VERSION,
        "settings": settings,
        "plain": section.template == "none",
        "template": tokenizer.chat_template,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "sources": [source.digest for source in sources],
        "seq_len": seq_len,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(decides, sort_keys=True).encode())


def make_rows(
    directory: Path,
    section: SFTSection,
    sources: list[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_len: int,
    key: str,
) -> None:
    """Write rows, tokenizer and manifest into `directory`. Raises `UserError` where nothing is left to train on."""
    counts = Counts()
    reader = Reader(sources, section.format, counts)
    encoder: Encoder = make_encoder(tokenizer, section)
    conversations = encode_all(reader.read(), encoder, counts, section)
    written = write_rows(conversations, directory, seq_len, section, counts)
    if not written.rows["train"]:
        reasons = "; ".join(counts.lines(section.overlong)) or f"{counts.held_out:,} held out"
        raise UserError(
            f"nothing to train on: none of {counts.read:,} rows of {', '.join(section.path)} is left ({reasons})"
        )
    tokenizer.save_pretrained(directory / TOKENIZER)
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
        "ignored": sorted(reader.ignored),
        "counts": attrs.asdict(counts),
        **attrs.asdict(written),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def report(directory: Path) -> list[str]:
    """Return the lines of a run's log that say what its rows are, and what was left out."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    counts = Counts(**manifest["counts"])
    by_keys = ", recognised by its keys" if manifest["recognised"] else ""
    named = [f"{name} (format {kind}{by_keys})" for name, kind in manifest["formats"].items()]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    ignored = f"; keys not read: {', '.join(manifest['ignored'])}" if manifest["ignored"] else ""
    share = counts.trained_tokens / max(1, counts.tokens)
    of_all = f"{counts.trained_tokens:,} of {counts.tokens:,} tokens ({share:.1%}) are trained"
    trained = f"train_on {manifest['train_on']}: {of_all}"
    rows, fill = manifest["rows"], manifest["fill"]
    packed = f"{rows['train']:,} rows of {manifest['seq_len']}, {fill['train']:.2%} full"
    held_out = f"{counts.held_out:,} conversations held out in {rows['held_out']:,} rows"
    return [
        f"{counts.read:,} conversations of {', '.join(named[:3])}{more}{ignored}",
        f"{manifest['how']}; {trained}",
        f"packing {manifest['packing']}: {packed}; {held_out}",
        *counts.lines(manifest["overlong"]),
    ]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
