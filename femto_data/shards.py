"""Shards: a few million characters' worth of pieces, tokenised together and kept on disk, so that work can go on later.

Where a shard begins and ends follows from the documents alone, so a shard made by a run that was killed is the one that
the next run would make.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from femto_core.errors import UserError
from femto_data.documents import Piece

CHARACTERS = 2**22  # a shard is closed when it holds so many
_FIRST, _LAST = 1, 2  # flags of a piece
_COMPLETE = "complete"

Encode = Callable[[Sequence[str]], tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]


@attrs.frozen
class Shard:
    """Tokenised pieces, in order."""

    document: int
    """Number of the document that the first piece belongs to."""
    sources: npt.NDArray[np.int32]
    """Each piece's input [pieces]."""
    flags: npt.NDArray[np.int32]
    """Whether it begins (1) and ends (2) its document [pieces]."""
    lengths: npt.NDArray[np.int32]
    """Number of its ids, EOS included [pieces]; 0 for an empty document."""
    ids: npt.NDArray[np.int32]
    """[sum of lengths]."""

    @property
    def begins(self) -> npt.NDArray[np.bool_]:
        """Whether each piece is its document's first [pieces]."""
        begins: npt.NDArray[np.bool_] = self.flags & _FIRST > 0
        return begins

    @property
    def ends(self) -> npt.NDArray[np.bool_]:
        """Whether each piece is its document's last [pieces]."""
        ends: npt.NDArray[np.bool_] = self.flags & _LAST > 0
        return ends

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        """Whether each piece is an empty document [pieces]."""
        empty: npt.NDArray[np.bool_] = (self.flags == _FIRST | _LAST) & (self.lengths == 0)
        return empty

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """Number of each piece's document [pieces]."""
        first = np.cumsum(self.begins)
        return self.document + first - (first[0] if len(first) else 0)

    def save(self, file: Path) -> None:
        """Write it to `file`, whole or not at all, on disk when this returns."""
        head = np.asarray([len(self.sources), self.document & 0x7FFFFFFF, self.document >> 31], np.int32)
        content = io.BytesIO()  # into a file numpy writes by itself, and says of a full disk only that it wrote less
        np.save(content, np.concatenate([head, self.sources, self.flags, self.lengths, self.ids]))
        partial = file.with_name(file.name + ".tmp")
        with partial.open("wb") as stream:
            stream.write(content.getbuffer())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)

    @classmethod
    def load(cls, file: Path) -> Shard:
        """Read what `save` wrote. Raises UserError for anything else, upon which all shards are removed."""
        try:
            values = np.load(file)
            count, low, high = (int(value) for value in values[:3])
            sources, flags, lengths = values[3 : 3 + 3 * count].reshape(3, count)
            ids = values[3 + 3 * count :]
            if len(ids) != lengths.sum():
                raise ValueError("a length")
        except (ValueError, EOFError, FileNotFoundError) as error:
            raise UserError(
                f"{file} is damaged or missing; what was tokenised so far has been removed: run it again"
            ) from error
        return cls(low | high << 31, sources, flags, lengths, ids)


def make_shards(pieces: Iterable[Piece], folder: Path, encode: Encode, *, eos_id: int, workers: int) -> int:
    """Tokenise `pieces` into files in `folder` but for those that are there already; return the number of shards.

    `workers` threads call `encode`. Memory holds two shards of text for each of them.
    """
    complete = folder / _COMPLETE
    if complete.exists():
        return int(complete.read_text())
    folder.mkdir(exist_ok=True)
    count = 0
    pending: set[Future[None]] = set()
    with ThreadPoolExecutor(workers) as threads:
        try:
            for group in _group(pieces):
                file = shard_file(folder, count)
                count += 1
                if not file.exists():
                    pending.add(threads.submit(_make, group, file, encode, eos_id))
                if len(pending) >= 2 * workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            for future in pending:
                future.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    partial = complete.with_name(complete.name + ".tmp")
    partial.write_text(str(count))
    os.replace(partial, complete)
    return count


def shard_file(folder: Path, number: int) -> Path:
    """Return where shard `number` is kept."""
    return folder / f"{number:08}.npy"


def load_shards(folder: Path, count: int) -> Iterator[Shard]:
    """Yield the shards in order, one in memory at a time."""
    for number in range(count):
        yield Shard.load(shard_file(folder, number))


def _group(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text) + 64  # a document without text takes memory too
        if size >= CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _make(pieces: list[Piece], file: Path, encode: Encode, eos_id: int) -> None:
    lengths, ids = encode([piece.text for piece in pieces])
    parts: list[npt.NDArray[np.int32]] = []
    eos = np.asarray([eos_id], np.int32)
    for number, (piece, found) in enumerate(zip(pieces, np.split(ids, np.cumsum(lengths)[:-1]), strict=True)):
        if piece.first and piece.last and (not len(found) or not piece.text.strip()):
            lengths[number] = 0  # an empty document
            continue
        parts.append(found)
        if piece.last:
            parts.append(eos)
            lengths[number] += 1
    Shard(
        pieces[0].document,
        np.asarray([piece.source for piece in pieces], np.int32),
        np.asarray([piece.first * _FIRST + piece.last * _LAST for piece in pieces], np.int32),
        lengths,
        np.concatenate(parts) if parts else np.empty(0, np.int32),
    ).save(file)
