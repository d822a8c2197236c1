"""`femto preprocess`: read documents, tokenise them in parallel, append EOS, concatenate, cut into rows, write.

Tokenised documents are kept, in order, in shards on disk, so the result is the same to the byte for any number of
workers, and for a run that was killed and resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from femto_core.errors import UserError
from femto_data.atomic import atomic_path
from femto_data.config import PreprocessConfig
from femto_data.dataset import FORMAT as ROWS_FORMAT
from femto_data.documents import TextPiece, read_pieces
from femto_data.encoder import DocumentEncoder, SlowTokenizer, TokenizerPool
from femto_data.files import SourceFile
from femto_data.manifest import FORMAT, SOURCES_NAME, Manifest, SourceCounts, is_dataset, write_manifest
from femto_data.mixture import check_weights
from femto_data.progress import Progress, show_progress
from femto_data.shards import Encode, load_shards, make_shards
from femto_data.sources import InputSource, digest_files, digest_of_digests, find_sources, write_source_list
from femto_data.splits import HeldOut, Shards, WrittenSplits, write_splits
from femto_data.tokenizer import (
    LARGEST_VOCABULARY,
    SMALLEST_VOCABULARY,
    draw_sample,
    load_tokenizer,
    save_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
    vocabulary_size,
)
from femto_data.workspace import Interrupted, open_workspace

_MOST_WORKERS = 256  # each is a process
_MAKING = 1  # raised whenever equal input gives other shards, so that a killed run's older shards are not reused


@attrs.frozen
class _Input:
    """An input with its version: the digests of its files, or the commit of a Hugging Face dataset."""

    source: InputSource
    files: Sequence[SourceFile]
    revision: str


def preprocess(config: PreprocessConfig, *, quiet: bool = False) -> Manifest:
    """Write the dataset of `config` to `config.output`, complete or not at all, and return its manifest.

    The dataset is written to a hidden folder beside the output, which is renamed at the end and replaces an earlier
    dataset. The folder's name has a digest of the arguments, the sources' contents and the tokenizer. A killed run
    leaves the folder; the next run with the same digest tokenises only the missing shards, a run with another digest
    removes it. `quiet` hides the progress.

    Raises UserError, and removes the folder, if input cannot be read, changes meanwhile, or fills no row. Raises
    UserError, and keeps the folder for the next run, if the disk is full, a worker is killed or the network fails
    (`Interrupted`).
    """
    _check(config)
    output = Path(config.output).resolve()  # replace a link's target, not the link
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
        except OSError as error:  # an error of writing: errors of reading are UserErrors by now
            raise UserError(
                f"{output} cannot be completed ({error.strerror or error}); finished work is kept: run the same "
                f"command again to resume, or remove {output.parent / f'.{output.name}.partial-*'}"
            ) from error
    return manifest


def _check(config: PreprocessConfig) -> None:
    """Raise UserError for values out of range, and for an output that is no dataset and not empty."""
    bounds = {"seq_len": (1, 2**31), "workers": (1, _MOST_WORKERS), "seed": (0, 2**63 - 1)}
    bounds["vocab_size"] = (SMALLEST_VOCABULARY, LARGEST_VOCABULARY)  # 256 bytes and EOS at least
    for name, (least, most) in bounds.items():
        if not least <= getattr(config, name) <= most and not (name == "vocab_size" and config.tokenizer):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {getattr(config, name)} is out of range; give a number from {least} to {most}")
    if not 0 <= config.held_out < 1:
        raise UserError(
            f"held_out = {config.held_out} is not a share of the documents; give a number from 0 to below 1"
        )
    if not config.input or "" in config.input:
        raise UserError("input names nothing to read; give files, directories or Hugging Face datasets")
    if Path(config.glob).is_absolute():
        raise UserError(f"--glob {config.glob} is absolute; give a pattern for the files below each --input directory")
    check_weights(config.weights, config.input)
    if not config.output:
        raise UserError("output is empty; name the directory to write")
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; name a directory")
    if output.is_dir() and any(output.iterdir()) and not is_dataset(output):
        raise UserError(f"output {output} is not empty and holds no femto dataset; name another directory")


def _examine(source: InputSource, workers: int) -> _Input:
    if source.is_hub:
        from femto_data.hub import hub_revision  # the libraries behind it take seconds to load

        return _Input(source, (), hub_revision(source.name))
    return _Input(source, digest_files(source.files, workers), "")


def _key(config: PreprocessConfig, inputs: Sequence[_Input], tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a digest, 16 hexadecimal characters, of everything that the result depends on."""
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
    """Write `folder`/dataset and return its manifest."""
    made = folder / "dataset"
    if made.exists():
        shutil.rmtree(made)
    made.mkdir()
    inputs = [_fetched(one, config, folder, number, progress) for number, one in enumerate(inputs)]

    def pieces() -> Iterator[TextPiece]:
        return progress.watch(read_pieces([[file.path for file in one.files] for one in inputs], config.text_key))

    if tokenizer is None:
        progress.phase = "training a tokenizer"
        _train_tokenizer(pieces(), config, folder / "tokenizer")
        tokenizer = load_tokenizer(str(folder / "tokenizer"))
    save_tokenizer(tokenizer, made / "tokenizer")
    tokenizer = load_tokenizer(str(made / "tokenizer"))  # tokenise with exactly what training will load
    progress.phase = "tokenising"
    shards = _tokenise(pieces(), inputs, tokenizer, config, folder / "shards")
    progress.phase = "writing rows"
    vocab_size, fingerprint = vocabulary_size(tokenizer), tokenizer_fingerprint(tokenizer)
    eos_id = int(tokenizer.eos_token_id)
    written = write_splits(shards, config, made, vocab_size=vocab_size, fingerprint=fingerprint, eos_id=eos_id)
    manifest = _manifest(config, inputs, written, vocab_size, fingerprint)
    write_source_list([(one.source.name, one.files) for one in inputs], made / SOURCES_NAME)
    write_manifest(manifest, made)
    return manifest


def _tokenise(
    pieces: Iterator[TextPiece],
    inputs: Sequence[_Input],
    tokenizer: PreTrainedTokenizerBase,
    config: PreprocessConfig,
    folder: Path,
) -> Shards:
    """Tokenise `pieces` into shards in `folder`. Raises UserError without a document, or if a file changed."""
    with _encoder(tokenizer, config) as encode:
        count = make_shards(pieces, folder, encode, eos_id=int(tokenizer.eos_token_id), workers=config.workers)
    for one in inputs:
        for file in one.files:
            file.check_unchanged()
    if not count:
        raise UserError(f"{', '.join(config.input[:3])} holds no document; give input with text in it")
    return lambda: load_shards(folder, count)


def _fetched(one: _Input, config: PreprocessConfig, folder: Path, number: int, progress: Progress) -> _Input:
    """Return `one` with a local copy in `folder` if it is a Hugging Face dataset."""
    if not one.source.is_hub:
        return one
    from femto_data.hub import fetch

    progress.phase = f"fetching {one.source.name}"
    copy = folder / f"fetched-{number}.parquet"
    fetch(one.source.name, one.revision, config.text_key, copy)
    return attrs.evolve(one, files=digest_files([copy], 1))


def _train_tokenizer(pieces: Iterator[TextPiece], config: PreprocessConfig, directory: Path) -> None:
    """Save a tokenizer trained on the documents that are not held out, unless `directory` exists."""
    if directory.exists():
        return
    held_out = HeldOut(config.held_out, config.seed)
    sample = draw_sample(piece for piece in pieces if not (config.held_out and held_out(piece.document)))
    with atomic_path(directory) as partial:
        save_tokenizer(train_tokenizer(sample, config.vocab_size), partial)


@contextlib.contextmanager
def _encoder(tokenizer: PreTrainedTokenizerBase, config: PreprocessConfig) -> Iterator[Encode]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described: str | SlowTokenizer = tokenizer if backend is None else backend.to_str()
    if config.workers == 1:
        yield DocumentEncoder(described, config.tokenizer)
    else:
        with TokenizerPool(described, config.tokenizer, config.workers) as pool:
            yield pool


def _manifest(
    config: PreprocessConfig, inputs: Sequence[_Input], written: WrittenSplits, vocab_size: int, fingerprint: str
) -> Manifest:
    whole = sum(config.weights)
    counts = written.counts
    rows = {file.name: file.rows for file in written.files}
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
        dropped_tokens=written.dropped_tokens,
        seq_len=config.seq_len,
        vocab_size=vocab_size,
        tokenizer=fingerprint,
        held_out=config.held_out,
        seed=config.seed,
        files=tuple(written.files),
    )
