"""Documents to rows, offline and once: read, tokenise in parallel, append EOS, concatenate, cut, write.

Documents travel in order through shards on disk, so the result is the same to the byte for any number of workers, and
for a run that was killed and started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from femto_core.errors import UserError
from femto_data.config import PreprocessConfig
from femto_data.dataset import FORMAT as ROWS_FORMAT
from femto_data.documents import Piece, read_pieces
from femto_data.encoder import Encoder, SlowTokenizer, WorkerPool
from femto_data.files import SourceFile
from femto_data.manifest import FORMAT, SOURCES_NAME, Manifest, SourceCounts, is_dataset, write_manifest
from femto_data.mixture import check_weights
from femto_data.packing import HeldOut, Packed, pack
from femto_data.progress import Progress, show_progress
from femto_data.shards import Encode, load_shards, make_shards
from femto_data.sources import Source, digest_files, digest_of_digests, find_sources, write_source_list
from femto_data.tokenizer import (
    SMALLEST_VOCABULARY,
    draw_sample,
    load_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from femto_data.workspace import Interrupted, open_workspace

_MAKING = 1  # raised whenever the way shards are made changes, so that no killed run's are taken for new ones


@attrs.frozen
class _Input:
    """An input with what it stands at: the digests of its files, or the commit of a Hugging Face dataset."""

    source: Source
    files: Sequence[SourceFile]
    revision: str


def preprocess(config: PreprocessConfig, *, quiet: bool = False) -> Manifest:
    """Write the dataset `config` describes to `config.output`, whole or not at all, and return its manifest.

    Everything is made in a hidden folder beside the output and renamed at the end, in an earlier dataset's place too.
    The folder is named by a digest of the arguments, the sources' contents and the tokenizer. A run that is killed
    leaves it, and the next one with the same digest reads the documents again but tokenises only what is missing; a run
    with another removes it. `quiet` hides the progress. Raises UserError for input that cannot be read, that changes
    meanwhile, or that does not fill a row, and then leaves nothing; and for a full disk, a worker that was killed or a
    network that fails (`Interrupted`), which leave what is done.
    """
    _check(config)
    output = Path(config.output).resolve()  # a link's target is replaced, not the link
    with show_progress(quiet) as progress:
        progress.phase = "reading the sources"
        inputs = [_examine(source, config.workers) for source in find_sources(config)]
        tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
        try:
            with open_workspace(output, _key(config, inputs, tokenizer)) as workspace:
                try:
                    manifest = _make(config, inputs, tokenizer, workspace.folder, progress)
                except Interrupted:
                    raise
                except UserError:
                    workspace.remove()
                    raise
                workspace.publish(workspace.folder / "dataset")
        except OSError as error:  # of reading, a UserError has been made long since
            raise UserError(
                f"{output} cannot be completed ({error.strerror or error}); what is done is kept beside it: mend that "
                f"and run the same command again, or remove {output.parent / f'.{output.name}.partial-*'}"
            ) from error
    return manifest


def _check(config: PreprocessConfig) -> None:
    """Refuse values that cannot be meant, and an output that is not ours to replace."""
    for name, least in (("seq_len", 1), ("workers", 1)):
        if getattr(config, name) < least:
            raise UserError(f"{name} = {getattr(config, name)} is too small; give {least} or more")
    if not 0 <= config.held_out < 1:
        raise UserError(f"held_out = {config.held_out} is no share of the documents; give a number from 0 to below 1")
    if not config.tokenizer and config.vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size = {config.vocab_size} is too small for a byte-level tokenizer; "
            f"{SMALLEST_VOCABULARY} (256 bytes and EOS) is the least"
        )
    if not config.input or "" in config.input:
        raise UserError("input names nothing to read; give files, directories or Hugging Face datasets")
    check_weights(config.weights, config.input)
    if not config.output:
        raise UserError("output is empty; name the directory to write")
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; name a directory")
    if output.is_dir() and any(output.iterdir()) and not is_dataset(output):
        raise UserError(f"output {output} holds something else than a femto dataset; name another directory")


def _examine(source: Source, workers: int) -> _Input:
    if source.is_hub:
        from femto_data.hub import hub_revision  # the libraries behind it take seconds to load

        return _Input(source, (), hub_revision(source.name))
    return _Input(source, digest_files(source.files, workers), "")


def _key(config: PreprocessConfig, inputs: Sequence[_Input], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return 16 hexadecimal characters for everything that the result depends on."""
    arguments = attrs.asdict(config)
    del arguments["workers"], arguments["output"]
    files = [[[str(file.path), file.sha256] for file in one.files] for one in inputs]
    versions = [_MAKING, FORMAT, ROWS_FORMAT, tokenizers.__version__, transformers.__version__]
    revisions = [one.revision for one in inputs]
    fingerprint = tokenizer_fingerprint(tokenizer) if tokenizer else ""
    whole = json.dumps([arguments, files, revisions, versions, fingerprint], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _make(
    config: PreprocessConfig,
    inputs: Sequence[_Input],
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    progress: Progress,
) -> Manifest:
    """Make `folder`/dataset and return its manifest."""
    made = folder / "dataset"
    if made.exists():
        shutil.rmtree(made)
    made.mkdir()
    inputs = [_fetched(one, config, folder, number, progress) for number, one in enumerate(inputs)]
    files = [[file.path for file in one.files] for one in inputs]
    if tokenizer is None:
        progress.phase = "training a tokenizer"
        _trained(progress.watch(read_pieces(files, config.text_key)), config, folder / "tokenizer")
        tokenizer = load_tokenizer(str(folder / "tokenizer"))
    _save(tokenizer, made / "tokenizer")
    # From here on it is the tokenizer that training will load: what is recorded is what is used.
    tokenizer = load_tokenizer(str(made / "tokenizer"))
    progress.phase = "tokenising"
    with _encoder(tokenizer, config.workers) as encode:
        count = make_shards(
            progress.watch(read_pieces(files, config.text_key)),
            folder / "shards",
            encode,
            eos_id=int(tokenizer.eos_token_id),
            workers=config.workers,
        )
    for one in inputs:
        for file in one.files:
            file.check_unchanged()
    if not count:
        raise UserError(f"{', '.join(config.input[:3])} holds no document; give input with text in it")
    progress.phase = "writing rows"
    vocab_size = vocabulary_size(tokenizer)
    fingerprint = tokenizer_fingerprint(tokenizer)
    packed = pack(
        lambda: load_shards(folder / "shards", count),
        config,
        made,
        vocab_size=vocab_size,
        fingerprint=fingerprint,
        eos_id=int(tokenizer.eos_token_id),
    )
    manifest = _manifest(config, inputs, packed, vocab_size, fingerprint)
    write_source_list([(one.source.name, one.files) for one in inputs], made / SOURCES_NAME)
    write_manifest(manifest, made)
    return manifest


def _fetched(one: _Input, config: PreprocessConfig, folder: Path, number: int, progress: Progress) -> _Input:
    """Return `one` with a local copy in `folder` if it is a Hugging Face dataset."""
    if not one.source.is_hub:
        return one
    from femto_data.hub import fetch

    progress.phase = f"fetching {one.source.name}"
    copy = folder / f"fetched-{number}.parquet"
    fetch(one.source.name, one.revision, config.text_key, copy)
    return attrs.evolve(one, files=digest_files([copy], 1))


def _trained(pieces: Iterator[Piece], config: PreprocessConfig, directory: Path) -> None:
    """Save a tokenizer trained on the documents that are not held out, unless it is there."""
    if directory.exists():
        return
    held_out = HeldOut(config.held_out, config.seed)
    sample = draw_sample(piece for piece in pieces if not (config.held_out and held_out(piece.document)))
    partial = directory.with_name(directory.name + ".tmp")
    _save(train_tokenizer(sample, config.vocab_size), partial)
    os.replace(partial, directory)


def _save(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        raise OSError(str(error)) from error  # the library in Rust raises nothing more precise on a full disk


@contextlib.contextmanager
def _encoder(tokenizer: PreTrainedTokenizerBase, workers: int) -> Iterator[Encode]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described: str | SlowTokenizer = tokenizer if backend is None else backend.to_str()
    if workers == 1:
        yield Encoder(described)
    else:
        with WorkerPool(described, workers) as pool:
            yield pool


def _manifest(
    config: PreprocessConfig, inputs: Sequence[_Input], packed: Packed, vocab_size: int, fingerprint: str
) -> Manifest:
    whole = sum(config.weights)
    counts = packed.counts
    rows = {file.name: file.rows for file in packed.files}
    return Manifest(
        sources=tuple(
            SourceCounts(
                name=one.source.name,
                files=len(one.files),
                bytes=sum(file.size for file in one.files),
                sha256=digest_of_digests(one.files),
                revision=one.revision,
                weight=config.weights[number] / whole if config.weights else None,
                **attrs.asdict(counts[number]),
            )
            for number, one in enumerate(inputs)
        ),
        documents=sum(count.documents for count in counts),
        empty_documents=sum(count.empty_documents for count in counts),
        tokens=sum(count.tokens for count in counts),
        train_tokens=sum(count.train_tokens for count in counts),
        held_out_tokens=sum(count.held_out_tokens for count in counts),
        rows_train=rows["train.safetensors"],
        rows_held_out=rows.get("held_out.safetensors", 0),
        dropped_tokens=packed.dropped_tokens,
        seq_len=config.seq_len,
        vocab_size=vocab_size,
        tokenizer=fingerprint,
        held_out=config.held_out,
        seed=config.seed,
        files=tuple(packed.files),
    )
