"""What `femto preprocess` is told; apart from preprocess.py, so that --help loads none of the heavy libraries."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class PreprocessConfig:
    """Turn text into a dataset: tokenise every document, append EOS, concatenate, cut into rows."""

    input: tuple[str, ...]
    """Files, directories and Hugging Face datasets (NAME or NAME:CONFIG, the train split), read in this order; files
    with an object a line (.jsonl, .ndjson, .json, each also .gz), .parquet, or .txt, .md and .py, a document each."""

    seq_len: int
    """Tokens a row is trained on; a row holds one more, which is the next row's first."""

    output: str
    """Directory to write; one that holds anything but an earlier dataset is refused."""

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
