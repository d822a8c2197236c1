"""What `femto preprocess` and `femto data-inspect` are told; in its own file, so that --help loads nothing heavy."""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class PreprocessConfig:
    """Turn text into a dataset: tokenise every document, append EOS, concatenate, cut into rows.

    Killed at any moment and started again with the same arguments, it goes on from what was tokenised, and the result
    is the same to the byte. What is left of other arguments, other sources or another tokenizer is never used.
    """

    input: tuple[str, ...]
    """Files, directories and Hugging Face datasets (NAME or NAME:CONFIG, the train split), read in this order; files
    with an object a line (.jsonl, .ndjson, .json, each also .gz and .zst), .parquet, or .txt, .md and .py, a document
    each."""

    seq_len: int
    """Tokens a row is trained on; a row holds one more, which is the next row's first."""

    output: str
    """Directory to write; one that holds anything but an earlier dataset is refused."""

    weights: tuple[float, ...] = ()
    """One number for each input, its share of the training tokens; their sum is taken as 1. The number of tokens stays
    what it is without weights: of an input that has too many, documents spread evenly over it are left out; one that
    has too few is read again and again, the last time in part. Held-out documents come once each."""

    tokenizer: str = ""
    """Directory or Hugging Face name of the tokenizer; left empty, a byte-level BPE is trained on the documents."""

    vocab_size: int = 4096
    """Size of the tokenizer trained on the documents, its 256 bytes and EOS included; no meaning beside --tokenizer."""

    text_key: str = "text"
    """Key or column that holds a document's text in JSON Lines, Parquet and Hugging Face datasets."""

    glob: str = "**/*.txt"
    """Which files of a directory are read; one that is neither JSON Lines nor Parquet is plain text, one document."""

    workers: int = 1
    """Processes that tokenise; the result does not depend on it."""

    held_out: float = 0.0
    """Share of the documents kept out of training, chosen by a hash of the seed and the document's number."""

    seed: int = 0
    """Seed of that choice."""


@attrs.frozen(kw_only=True)
class InspectConfig:
    """Show what a dataset holds: the manifest's counts, and rows as text with the documents' ends visible."""

    directory: str
    """Directory that `femto preprocess` wrote."""

    rows: tuple[int, ...] = (0,)
    """Rows to show."""

    split: Literal["train", "held_out"] = "train"
    """Which of the dataset's files."""

    check: bool = False
    """Read all rows of both files too, and compare them with the digest taken when they were written."""
