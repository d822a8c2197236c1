"""Making datasets in tests: small sources, a run, and the contents of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from femto_core.errors import UserError
from femto_data.config import PreprocessConfig
from femto_data.dataset import PackedDataset
from femto_data.manifest import Manifest
from femto_data.preprocess import preprocess

TEXTS = ["The cat sat.\n", "Ωmega \r\n tail ", "日本語 🙂", "x" * 300, "a<|endoftext|>b", "\n\nlast"] * 4


def run(tmp_path: Path, *inputs: Path | str, **changes: Any) -> Manifest:
    settings: dict[str, Any] = {"seq_len": 8, "vocab_size": 300, "output": str(tmp_path / "out")}
    return preprocess(PreprocessConfig(input=tuple(map(str, inputs)), **(settings | changes)), quiet=True)


def refusal(tmp_path: Path, *inputs: Path | str, **changes: Any) -> str:
    """The error sentence of a refused run, which must leave no files."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(UserError) as caught:
        run(tmp_path, *inputs, **changes)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


def jsonl(file: Path, *lines: bytes | str | dict[str, object]) -> Path:
    parts = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]
    file.write_bytes(b"\n".join(part.encode() if isinstance(part, str) else part for part in parts))
    return file


def texts(file: Path, *documents: str) -> Path:
    return jsonl(file, *(json.dumps({"text": document}) for document in documents))


def contents(directory: Path) -> dict[str, bytes]:
    files = (file for file in sorted(directory.rglob("*")) if file.is_file())
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def stream(directory: Path, documents: list[str]) -> list[int]:
    """The expected token stream, computed one document at a time with the tokenizers library."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    ids: list[int] = []
    for document in documents:
        if document.strip():
            ids += [*backend.encode(document, add_special_tokens=False).ids, tokenizer.eos_token_id]
    return ids


def rows(directory: Path, name: str = "train") -> list[list[int]]:
    dataset = PackedDataset(directory / f"{name}.safetensors")
    return [dataset[i].tolist() for i in range(len(dataset))]


def decoded(directory: Path, name: str = "train") -> str:
    """The text of rows of seq_len 1, without the stream's last token."""
    text = AutoTokenizer.from_pretrained(directory / "tokenizer").decode([row[0] for row in rows(directory, name)])
    assert isinstance(text, str)
    return text


def sliced(ids: list[int], seq_len: int) -> list[list[int]]:
    return [ids[i : i + seq_len + 1] for i in range(0, len(ids) - seq_len, seq_len)]
