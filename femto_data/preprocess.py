"""Documents to rows, offline and once: read, tokenise in parallel, append EOS, concatenate, cut, write.

The datasets library carries the documents between the steps, on disk and in order, so the result is the same to the
byte for any number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from femto_core.errors import UserError
from femto_data.config import PreprocessConfig
from femto_data.dataset import RowWriter, tokenizer_fingerprint
from femto_data.documents import find_sources, read_documents

FORMAT = "femto-dataset-1"
EOS = "<|endoftext|>"
_TRAINING_SAMPLE = 4 * 2**20  # characters a tokenizer is trained on: enough for a small vocabulary, a second of work
_SMALLEST_VOCABULARY = 257  # 256 bytes and EOS


@attrs.frozen(kw_only=True)
class Manifest:
    """What a dataset directory holds; its `manifest.json`."""

    sources: tuple[str, ...]
    documents: int
    """Documents with at least one token, held-out ones included."""
    empty_documents: int
    """Documents skipped because they hold no token, or nothing but white space."""
    tokens: int
    """Tokens of all documents, one EOS each included."""
    rows_train: int
    rows_held_out: int
    dropped_tokens: int
    """Tokens at the ends of the two streams that fill no row."""
    seq_len: int
    vocab_size: int
    tokenizer: str
    """The tokenizer's fingerprint."""
    format: str = FORMAT


def preprocess(config: PreprocessConfig, *, quiet: bool = False) -> Manifest:
    """Write the dataset `config` describes to `config.output`, whole or not at all, and return its manifest.

    Everything is made in a temporary sibling of the output and renamed at the end, in an earlier dataset's place too.
    `quiet` hides the progress bars. Raises UserError for input that cannot be read, or that does not fill a row.
    """
    _check(config)
    output = Path(config.output).resolve()  # a link's target is replaced, not the link
    sources = find_sources(config)  # before anything is written, so that a dataset never finds itself in its input
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)
    except OSError as error:
        raise UserError(f"output {output} cannot be written ({error.strerror}); name another directory") from error
    with temporary as name, _progress_bars(quiet):
        work = Path(name)
        made = work / "dataset"
        made.mkdir()
        documents = read_documents(sources, config.text_key, work / "cache")
        if config.tokenizer:
            tokenizer = _load_tokenizer(config.tokenizer)
        else:
            tokenizer = _train_tokenizer(_sample(documents, config), config.vocab_size)
        tokenizer.save_pretrained(made / "tokenizer")
        # From here on it is the tokenizer that training will load: what is recorded is what is used.
        tokenizer = _load_tokenizer(str(made / "tokenizer"))
        manifest = _write_rows(_tokenise_documents(documents, tokenizer, config.workers), tokenizer, config, made)
        (made / "manifest.json").write_text(json.dumps(attrs.asdict(manifest), indent=2) + "\n", encoding="utf-8")
        _replace(output, made, work / "replaced")
    return manifest


def _replace(output: Path, made: Path, aside: Path) -> None:
    """Rename `made` to `output`; what is there goes to `aside`, and comes back should the second rename fail."""
    there = output.exists()
    if there:
        os.replace(output, aside)
    try:
        os.replace(made, output)
    except BaseException:
        if there:
            os.replace(aside, output)
        raise


def _check(config: PreprocessConfig) -> None:
    """Refuse values that cannot be meant, and an output that is not ours to replace."""
    for name, least in (("seq_len", 1), ("workers", 1)):
        if getattr(config, name) < least:
            raise UserError(f"{name} = {getattr(config, name)} is too small; give {least} or more")
    if not 0 <= config.held_out < 1:
        raise UserError(f"held_out = {config.held_out} is no share of the documents; give a number from 0 to below 1")
    if not config.tokenizer and config.vocab_size < _SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size = {config.vocab_size} is too small for a byte-level tokenizer; "
            f"{_SMALLEST_VOCABULARY} (256 bytes and EOS) is the least"
        )
    if not config.input or "" in config.input:
        raise UserError("input names nothing to read; give files, directories or Hugging Face datasets")
    if not config.output:
        raise UserError("output is empty; name the directory to write")
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; name a directory")
    if output.is_dir() and any(output.iterdir()):
        try:
            ours = json.loads((output / "manifest.json").read_bytes())["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            ours = False
        if not ours:
            raise UserError(f"output {output} holds something else than a femto dataset; name another directory")


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or Hugging Face name; it must have an EOS, which ends every document."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserError(
            f"tokenizer {name} cannot be loaded ({' '.join(str(error).split())[:200]}); give a directory that "
            f"save_pretrained wrote, or a Hugging Face name while there is a network"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {name} has no EOS token to end documents with; set its eos_token and save it again")
    return tokenizer


def _train_tokenizer(sample: Iterator[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE trained on `sample`: any text comes back exactly; equal samples give equal merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    # Clean-up would drop spaces before punctuation when decoding, and the text would not come back.
    wrap: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast  # its own __init__ carries no types
    return wrap(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def _sample(documents: datasets.Dataset, config: PreprocessConfig) -> Iterator[str]:
    """Yield about `_TRAINING_SAMPLE` characters spread evenly over the documents that are not held out."""
    stride = max(1, min(documents.data.nbytes // _TRAINING_SAMPLE, len(documents) // 64))
    chosen = range(0, len(documents), stride)
    longest = _TRAINING_SAMPLE // min(16, len(chosen))  # no single document may fill the sample while there are others
    left = _TRAINING_SAMPLE
    for index in chosen:
        if not _is_held_out(index, config):
            text = documents[index]["text"][: min(longest, left)]
            left -= len(text)
            yield text
        if left <= 0:
            return


def _is_held_out(index: int, config: PreprocessConfig) -> bool:
    """Whether the document at `index` is held out: it hangs on the seed and on nothing around the document."""
    digest = hashlib.blake2b(f"{config.seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < config.held_out * 2**64


def _tokenise_documents(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, workers: int
) -> datasets.Dataset:
    """Return the documents' ids in order, one column `ids`; an empty document has none, any other ends in EOS."""
    return documents.map(
        _tokenise_batch,
        batched=True,
        batch_size=256,
        writer_batch_size=256,
        num_proc=min(workers, len(documents)) if workers > 1 else None,
        remove_columns=["text"],
        features=datasets.Features({"ids": datasets.Sequence(datasets.Value("int32"))}),
        fn_kwargs={"tokenizer": tokenizer},
        new_fingerprint="ids",  # the cache lives for this one call: hashing the tokenizer to name the file buys nothing
        desc="tokenising",
    )


def _tokenise_batch(batch: dict[str, list[str]], *, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    # A document is text: one that spells out "<|endoftext|>" must not end there, so special tokens split like words.
    # `verbose` would warn of documents longer than the model's context, which rows take care of.
    encoded = tokenizer(batch["text"], add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return {
        "ids": [
            [*ids, tokenizer.eos_token_id] if ids and text.strip() else []
            for ids, text in zip(encoded, batch["text"], strict=True)
        ]
    }


def _write_rows(
    tokenised: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, config: PreprocessConfig, directory: Path
) -> Manifest:
    """Stream the documents' ids into train.safetensors and held_out.safetensors, and count."""
    vocab_size = 1 + max(tokenizer.get_vocab().values())  # len(tokenizer) is less where the ids have holes
    fingerprint = tokenizer_fingerprint(tokenizer)
    names = ("train", "held_out") if config.held_out else ("train",)
    seen = empty = 0
    tokens = dict.fromkeys(names, 0)
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                RowWriter(
                    directory / f"{name}.safetensors",
                    seq_len=config.seq_len,
                    vocab_size=vocab_size,
                    tokenizer_fingerprint=fingerprint,
                    eos_id=int(tokenizer.eos_token_id),
                )
            )
            for name in names
        }
        for table in tokenised.with_format("arrow").iter(batch_size=256):
            ids, lengths = _flatten(table)
            held_out = np.zeros(len(lengths), bool)
            if config.held_out:
                held_out[:] = [_is_held_out(seen + offset, config) for offset in range(len(lengths))]
            for name, chosen in zip(names, (~held_out, held_out), strict=False):
                part = ids[np.repeat(chosen, lengths)]
                tokens[name] += len(part)
                writers[name].append(part)
            seen += len(lengths)
            empty += int((lengths == 0).sum())
        if seen == empty:
            raise UserError(
                f"all {seen} documents of {', '.join(config.input[:3])} are empty; give input with text in it"
            )
        for name, writer in writers.items():
            if not writer.rows:
                raise UserError(
                    f"the {name.replace('_', '-')} documents have {tokens[name]} tokens, too few for one row of "
                    f"seq_len + 1 = {config.seq_len + 1}; give more text, a smaller seq_len or another share held out"
                )
    return Manifest(
        sources=config.input,
        documents=seen - empty,
        empty_documents=empty,
        tokens=sum(tokens.values()),
        rows_train=writers["train"].rows,
        rows_held_out=writers["held_out"].rows if config.held_out else 0,
        dropped_tokens=sum(writer.dropped_tokens for writer in writers.values()),
        seq_len=config.seq_len,
        vocab_size=vocab_size,
        tokenizer=fingerprint,
    )


def _flatten(table: pa.Table) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return a batch's ids [tokens], one document behind the other, and each document's length [documents]."""
    column = table.column("ids").combine_chunks()
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(), np.diff(offsets)


@contextlib.contextmanager
def _progress_bars(quiet: bool) -> Iterator[None]:
    """Hide the progress bars of the datasets library, a switch for the whole process, while the block runs."""
    switch = quiet and datasets.is_progress_bar_enabled()
    if switch:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if switch:
            datasets.enable_progress_bars()
