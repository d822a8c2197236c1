"""The options of `femto preprocess` and `femto data-inspect`, in a file of their own: --help loads nothing heavy."""

from __future__ import annotations

from typing import Literal

import attrs

from femto_core.sections import at_home


@attrs.frozen(kw_only=True)
class PreprocessConfig:
    """Turn text into a dataset: tokenise each document, append EOS, concatenate, cut into rows.

    If the command is killed and started again with the same arguments, it continues from the documents that were
    tokenised, and the result is the same to the byte. Files of a run with other arguments, sources or another
    tokenizer are never used.
    """

    input: tuple[str, ...] = attrs.field(converter=at_home)
    """Files, directories and Hugging Face datasets (NAME or NAME:CONFIG, the train split), read in this order. JSON
    files (.jsonl, .ndjson, .json, each also .gz and .zst) hold one document per line, .parquet files one per row, text
    files (.txt, .md, .py) one each."""

    seq_len: int
    """Tokens of a row that are trained. The row holds one more token, which is the first of the next row."""

    output: str = attrs.field(converter=at_home)
    """Directory to write. It must not exist, or be empty, or hold an earlier dataset, which is replaced."""

    weights: tuple[float, ...] = ()
    """Each input's share of the training tokens, one number per input; they are divided by their sum. The total
    token count is unchanged. Over-represented inputs are subsampled evenly; under-represented inputs are repeated, the
    last pass partial. Held-out documents are never repeated."""

    tokenizer: str = attrs.field(default="", converter=at_home)
    """Directory or Hugging Face name of the tokenizer. If it is empty, a byte-level BPE is trained on the documents."""

    vocab_size: int = 4096
    """Vocabulary size of the tokenizer trained on the documents, 256 bytes and EOS included; not for --tokenizer."""

    text_key: str = "text"
    """Key or column of a document's text in JSON Lines, Parquet and Hugging Face datasets."""

    glob: str = "**/*.txt"
    """Pattern of the files to read in a directory. A file that is neither JSON Lines nor Parquet is one document."""

    workers: int = 1
    """Processes that tokenise. The result does not depend on their number."""

    held_out: float = 0.0
    """Share of the documents kept out of training, chosen by a hash of the seed and each document's number."""

    seed: int = 0
    """Seed of the choice of held-out documents."""


@attrs.frozen(kw_only=True)
class InspectConfig:
    """Show what a dataset holds: the counts of its manifest, and rows as text with the ends of documents visible."""

    directory: str = attrs.field(metadata={"positional": True}, converter=at_home)
    """Directory that `femto preprocess` wrote."""

    rows: tuple[int, ...] = (0,)
    """Rows to show."""

    split: Literal["train", "held_out"] = "train"
    """File of the dataset to show."""

    check: bool = False
    """Read all rows of both files too, and compare them with the digest taken when they were written."""
