"""The dataset on disk: rows of token ids in a safetensors file, written in bounded memory and read by a memory map.

A dataset directory holds `train.safetensors`, perhaps `held_out.safetensors`, `tokenizer/` and `manifest.json`. Each
safetensors file has one tensor, `rows` [n, seq_len + 1]: row i is `stream[i * seq_len : i * seq_len + seq_len + 1]` of
the concatenated token stream, so neighbouring rows share one token, and every token but the first is a target of some
row. The header carries `id`, a digest of the rows; the manifest repeats it, so a file beside another dataset's manifest
is detected without reading a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from femto_core.errors import UserError
from femto_data.atomic import open_atomic
from femto_data.manifest import RowsFile, check_belongs

FORMAT = "femto-rows-3"
_DIGEST_SIZE = 16  # bytes
_DTYPES: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "I32": np.dtype("<i4")}


class RowWriter:
    """Writes one file of rows from a stream of tokens; memory holds one `append` and an unfinished row.

    A context manager: when its block ends, the header is filled in and the file gets its name; when the block raises,
    the file is removed. So it is complete or absent.
    """

    def __init__(self, file: Path, *, seq_len: int, vocab_size: int, tokenizer_fingerprint: str, eos_id: int) -> None:
        self.file = file
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.rows = 0
        self._dtype = "U16" if vocab_size <= 65536 else "I32"
        self._metadata = {
            "format": FORMAT,
            "seq_len": str(seq_len),
            "vocab_size": str(vocab_size),
            "tokenizer": tokenizer_fingerprint,
            "eos_id": str(eos_id),
        }
        self._digest = _digest(self._metadata)
        self._pending: npt.NDArray[np.int64] = np.empty(0, np.int64)  # the tokens from the next row's start on
        # The header holds the number of rows, which is known only at the end. safetensors allows trailing spaces in it,
        # so room for the longest possible header is reserved at the start, and no row is ever copied.
        self._header_size = -(-len(self._header(rows=2**62)) // 8) * 8
        self._stack = contextlib.ExitStack()
        self._stream = self._stack.enter_context(open_atomic(file))
        self._stack.push(self._write_header)
        self._stream.write(b" " * (8 + self._header_size))

    @property
    def dropped_tokens(self) -> int:
        """Number of tokens at the stream's end that are in no row so far."""
        return len(self._pending) - 1 if self.rows else len(self._pending)

    def append(self, tokens: npt.NDArray[np.integer[Any]]) -> None:
        """Append `tokens` [n] to the stream. Raises ValueError for an id outside the vocabulary, which is a defect."""
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"token ids {tokens.min()}..{tokens.max()} do not fit a vocabulary of {self.vocab_size}")
        stream = np.concatenate([self._pending, tokens.astype(np.int64)])
        rows = max(0, (len(stream) - 1) // self.seq_len)
        if rows:
            windows = np.lib.stride_tricks.sliding_window_view(stream, self.seq_len + 1)[:: self.seq_len][:rows]
            data = windows.astype(_DTYPES[self._dtype]).tobytes()  # [rows, seq_len + 1]
            self._stream.write(data)
            self._digest.update(data)
            self.rows += rows
        self._pending = stream[rows * self.seq_len :].copy()

    def _header(self, *, rows: int) -> bytes:
        shape = [rows, self.seq_len + 1]
        end = shape[0] * shape[1] * _DTYPES[self._dtype].itemsize
        tensor = {"dtype": self._dtype, "shape": shape, "data_offsets": [0, end]}
        metadata = self._metadata | {"id": self._digest.hexdigest()}
        return json.dumps({"__metadata__": metadata, "rows": tensor}, separators=(",", ":")).encode()

    def record(self) -> RowsFile:
        """Return the manifest's entry for the finished file."""
        size = self.file.stat().st_size
        return RowsFile(name=self.file.name, rows=self.rows, bytes=size, id=self._digest.hexdigest())

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _write_header(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._stream.seek(0)
            self._stream.write(struct.pack("<Q", self._header_size))
            self._stream.write(self._header(rows=self.rows).ljust(self._header_size))


class PackedDataset(Dataset[Tensor]):
    """The rows of one file, memory-mapped and looked up by index, without a position or an order.

    The dataset pickles as its path, so a spawned loader worker opens the file itself.
    """

    def __init__(self, file: Path) -> None:
        """Open `file`. Raises UserError if it is missing, in another format, truncated, stale or without rows.

        A file is stale if its size or `id` differs from the manifest's. None of these checks reads the rows;
        `check_rows` does.
        """
        self.file = Path(file)
        header, start = _read_header(self.file)
        try:
            metadata, tensor = header["__metadata__"], header["rows"]
            if metadata["format"] != FORMAT:
                raise ValueError("another format")
            self.seq_len = int(metadata["seq_len"])
            self.vocab_size = int(metadata["vocab_size"])
            self.tokenizer_fingerprint = str(metadata["tokenizer"])
            self.eos_id = int(metadata["eos_id"])
            self.id = str(metadata["id"])
            dtype = _DTYPES[tensor["dtype"]]
            self._length, width = (int(size) for size in tensor["shape"])
            if self.seq_len < 1 or width != self.seq_len + 1:
                raise ValueError("shape and metadata disagree")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.file} holds no rows in the format {FORMAT}; give a file that `femto preprocess` wrote"
            ) from error
        there, due = self.file.stat().st_size - start, self._length * width * dtype.itemsize
        if there != due:
            raise UserError(
                f"{self.file} is {'truncated' if there < due else 'damaged'}: its header promises {due} bytes of "
                f"rows, but it has {there}; copy it again or run `femto preprocess` again"
            )
        if not self._length:
            raise UserError(f"{self.file} holds no rows; preprocess more text or take a smaller seq_len")
        check_belongs(self.file, identity=self.id, tokenizer=self.tokenizer_fingerprint)
        self._metadata = {name: value for name, value in metadata.items() if name != "id"}
        self.tokenizer_path = self.file.parent / "tokenizer"
        self.fingerprint = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
        self._rows = np.memmap(self.file, dtype, mode="r", offset=start, shape=(self._length, width))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        """Return row `index` as int64 [seq_len + 1]. Raises IndexError below 0 and from len(self) on."""
        index = operator.index(index)
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self.file}, which has rows 0 to {self._length - 1}")
        return torch.from_numpy(self._rows[index].astype(np.int64))

    def largest_id(self) -> int:
        """Return the largest token id in the rows, all of which are read."""
        return int(self._rows.max())

    def check_rows(self) -> None:
        """Read all rows. Raises UserError if their digest is not the one recorded when they were written."""
        digest = _digest(self._metadata)
        step = max(1, 2**22 // (self.seq_len + 1))
        for start in range(0, self._length, step):
            digest.update(self._rows[start : start + step].tobytes())
        if digest.hexdigest() != self.id:
            raise UserError(
                f"{self.file} is damaged: its rows have digest {digest.hexdigest()}, but were written with {self.id}; "
                f"copy it again or run `femto preprocess` again"
            )

    def __reduce__(self) -> tuple[type[PackedDataset], tuple[Path]]:
        return (PackedDataset, (self.file,))


def _digest(metadata: dict[str, str]) -> hashlib.blake2b:
    """Return a digest of the header's other metadata, to be updated with the rows."""
    return hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=_DIGEST_SIZE)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and the offset of its data, in bytes."""
    if not file.is_file():
        what = "is a directory, not a file of rows" if file.is_dir() else "does not exist"
        raise UserError(f"{file} {what}; give the train.safetensors of a directory that `femto preprocess` wrote")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        # In a file of another format the first bytes may mean any length, so never read more than the file holds.
        text = stream.read(size) if size <= file.stat().st_size else b""
    try:
        header = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{file} is not a safetensors file, or only the beginning of one; copy it again or run `femto preprocess`"
        ) from error
    return (header if isinstance(header, dict) else {}), 8 + size
