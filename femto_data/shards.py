"""Shards: tokenised pieces of a few million characters, kept on disk so that a killed run can be resumed.

The documents alone decide where a shard begins and ends, so the shards of a killed run are those the next run needs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from femto_core.errors import UserError
from femto_data.atomic import write_atomic
from femto_data.documents import TextPiece

CHARACTERS = 2**22  # a shard is complete when it has this many
_FIRST, _LAST = 1, 2  # bits of `TokenShard.flags`
_COMPLETE = "complete"

Encode = Callable[[Sequence[str]], tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]
"""Texts to each text's number of ids [texts] and all ids, concatenated [sum]."""


@attrs.frozen
class TokenShard:
    """Tokenised pieces in order; the arrays of shape [pieces] have one element for each."""

    document: int
    """Number of the document that the first piece belongs to."""
    sources: npt.NDArray[np.int32]
    """Number of each piece's input [pieces]."""
    flags: npt.NDArray[np.int32]
    """Whether each piece begins (bit 1) and ends (bit 2) its document [pieces]."""
    lengths: npt.NDArray[np.int32]
    """Number of each piece's ids, including EOS [pieces]; 0 for an empty document."""
    ids: npt.NDArray[np.int32]
    """The ids of all pieces, concatenated [sum of lengths]."""

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
        """Write the shard to `file`, complete or not at all; its bytes are on disk on return."""
        head = np.asarray([len(self.sources), self.document & 0x7FFFFFFF, self.document >> 31], np.int32)
        content = io.BytesIO()  # on a full disk np.save to a file raises an error without the reason
        np.save(content, np.concatenate([head, self.sources, self.flags, self.lengths, self.ids]))
        write_atomic(file, content.getbuffer())

    @classmethod
    def load(cls, file: Path) -> TokenShard:
        """Read a shard that `save` wrote. Raises UserError, after which `preprocess` removes all shards, otherwise."""
        try:
            values = np.load(file)
            count, low, high = (int(value) for value in values[:3])
            sources, flags, lengths = values[3 : 3 + 3 * count].reshape(3, count)
            ids = values[3 + 3 * count :]
            if len(ids) != lengths.sum():
                raise ValueError("lengths and ids disagree")
        except (ValueError, EOFError, FileNotFoundError) as error:
            raise UserError(
                f"{file} is damaged or missing; all shards have been removed: run the command again"
            ) from error
        return cls(low | high << 31, sources, flags, lengths, ids)


def make_shards(pieces: Iterable[TextPiece], folder: Path, encode: Encode, *, eos_id: int, workers: int) -> int:
    """Tokenise `pieces` into shard files in `folder`, except shards that exist; return the number of all shards.

    `workers` threads call `encode`. Memory holds the text of two shards per thread.
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
    write_atomic(complete, str(count))
    return count


def shard_file(folder: Path, number: int) -> Path:
    """Return the file of shard `number`."""
    return folder / f"{number:08}.npy"


def load_shards(folder: Path, count: int) -> Iterator[TokenShard]:
    """Yield the shards in order; memory holds one at a time."""
    for number in range(count):
        yield TokenShard.load(shard_file(folder, number))


def _group(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    group: list[TextPiece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text) + 64  # even an empty document takes memory
        if size >= CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _make(pieces: list[TextPiece], file: Path, encode: Encode, eos_id: int) -> None:
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
    TokenShard(
        pieces[0].document,
        np.asarray([piece.source for piece in pieces], np.int32),
        np.asarray([piece.first * _FIRST + piece.last * _LAST for piece in pieces], np.int32),
        lengths,
        np.concatenate(parts) if parts else np.empty(0, np.int32),
    ).save(file)
