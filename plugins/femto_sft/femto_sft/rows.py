"""Packed rows on disk: the tokens of all documents, concatenated, and for each row the documents in it.

A directory holds `tokens` (int32) and `trained` (one byte each) of all documents, concatenated; `starts` (int64), each
document's first token, and the end; for each split `SPLIT.documents`, the documents row after row, and `SPLIT.rows`,
each row's first place in it, and the end; the tokenizer, with the ids that end trained turns in
`generation_config.json`; and `manifest.json`, which is written last.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from femto_core.errors import UserError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
GENERATION = "generation_config.json"
SPLITS = ("train", "held_out")
DTYPES: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "trained": np.dtype("<u1"), "starts": np.dtype("<i8")}
"""Dtypes of the files that both splits share; the splits' own files hold int64."""


@attrs.frozen(eq=False)
class Row:
    """One row of documents. Padding at its end is one more document."""

    ids: torch.Tensor
    """Token ids [s], int64."""
    trained: torch.Tensor
    """Whether each token is trained [s], bool."""
    lengths: tuple[int, ...]
    """Lengths of the documents, including padding; their sum is s."""


class ConversationRows(Dataset[Row]):
    """The rows of one split, memory-mapped and looked up by index. The dataset pickles as its path."""

    def __init__(self, directory: Path, split: str) -> None:
        """Open the rows. Raises `UserError` if a file is missing or its size differs from the manifest's."""
        self.directory, self.split = directory, split
        manifest = read_manifest(directory)
        self.seq_len, self.vocab_size, self._pad = manifest["seq_len"], manifest["vocab_size"], manifest["pad_id"]
        self.tokenizer_path = directory / TOKENIZER
        self.fingerprint = f"{manifest['key']} {split}"
        self._tokens = self._map("tokens", manifest)
        self._trained = self._map("trained", manifest)
        self._starts = self._map("starts", manifest)
        self._documents = self._map(f"{split}.documents", manifest)
        self._rows = self._map(f"{split}.rows", manifest)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> Row:
        """Return row `index`. Raises IndexError below 0 and from len(self) on."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {self.directory}, {self.split}, which has {len(self)} rows")
        ids = np.full(self.seq_len, self._pad, np.int64)
        trained = np.zeros(self.seq_len, np.bool_)
        lengths, end = [], 0
        for document in self.documents(index):
            start, stop = self._starts[document : document + 2].tolist()
            begin, end = end, end + stop - start
            ids[begin:end], trained[begin:end] = self._tokens[start:stop], self._trained[start:stop]
            lengths.append(stop - start)
        if end < self.seq_len:
            lengths.append(self.seq_len - end)
        return Row(torch.from_numpy(ids), torch.from_numpy(trained), tuple(lengths))

    def largest_id(self) -> int:
        """Return the largest token id in the conversations of both splits, all of which are read, or of padding."""
        return max(int(self._tokens.max(initial=0)), int(self._pad))

    def documents(self, index: int) -> list[int]:
        """Return the numbers of the documents in row `index`, in order."""
        start, stop = self._rows[index : index + 2].tolist()
        documents: list[int] = self._documents[start:stop].tolist()
        return documents

    def __reduce__(self) -> tuple[type[ConversationRows], tuple[Path, str]]:
        return (ConversationRows, (self.directory, self.split))

    def _map(self, name: str, manifest: dict[str, Any]) -> npt.NDArray[Any]:
        file, count = self.directory / name, manifest["files"][name]
        dtype = DTYPES.get(name, np.dtype("<i8"))
        if not file.is_file() or file.stat().st_size != count * dtype.itemsize:
            raise UserError(f"{file} is missing or damaged; remove {self.directory}, and the next run builds it again")
        return np.memmap(file, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of the rows in `directory`. Raises `UserError` if it cannot be read."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
        return manifest
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory / MANIFEST} cannot be read ({error}); remove {directory}, and the next run builds it again"
        ) from None
