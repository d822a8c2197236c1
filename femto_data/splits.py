"""Tokenised documents to the rows of two splits: which documents are held out, how often the others are written."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from femto_core.errors import UserError
from femto_data.config import PreprocessConfig
from femto_data.dataset import RowWriter
from femto_data.manifest import RowsFile
from femto_data.mixture import Mixture, ratios
from femto_data.shards import TokenShard

Shards = Callable[[], Iterable[TokenShard]]
"""Begins a new pass over all shards, in order."""


@attrs.frozen
class HeldOut:
    """The choice of held-out documents: a hash of the seed and the document's number decides, and nothing else."""

    share: float
    seed: int

    def __call__(self, document: int) -> bool:
        """Whether `document` is held out."""
        digest = hashlib.blake2b(f"{self.seed}:{document}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64

    def of(self, shard: TokenShard) -> npt.NDArray[np.bool_]:
        """Whether each piece's document is held out [pieces]."""
        documents = shard.documents
        if not self.share:
            return np.zeros(len(documents), np.bool_)
        first, last = int(documents[0]), int(documents[-1])
        chosen = np.asarray([self(document) for document in range(first, last + 1)])
        return chosen[documents - first]


@attrs.define
class TokenCounts:
    """Documents and tokens of one input."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    held_out_documents: int = 0
    held_out_tokens: int = 0
    train_documents: int = 0
    """Documents written for training; a document that is written twice counts twice."""
    train_tokens: int = 0


@attrs.frozen
class WrittenSplits:
    """What `write_splits` wrote."""

    counts: Sequence[TokenCounts]
    """One for each input."""
    files: Sequence[RowsFile]
    dropped_tokens: int
    """Tokens at the ends of the streams that fill no row."""


def write_splits(
    shards: Shards, config: PreprocessConfig, directory: Path, *, vocab_size: int, fingerprint: str, eos_id: int
) -> WrittenSplits:
    """Write train.safetensors and, if documents are held out, held_out.safetensors into `directory`.

    Memory holds one shard. Raises UserError where all documents are empty or a file would have no row.
    """
    held_out = HeldOut(config.held_out, config.seed)
    counts = _count(shards(), held_out, len(config.input))
    _check_not_empty(counts, config)
    available = [count.tokens - count.held_out_tokens for count in counts]
    mixture = Mixture(ratios(config.weights, available, config.input))
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                RowWriter(
                    directory / f"{split}.safetensors",
                    seq_len=config.seq_len,
                    vocab_size=vocab_size,
                    tokenizer_fingerprint=fingerprint,
                    eos_id=eos_id,
                )
            )
            for split in ("train", "held_out")[: 2 if config.held_out else 1]
        }
        _write_streams(shards, held_out, mixture, writers, counts)
        _check_rows(writers, counts, config)
    files = [writer.record() for writer in writers.values()]
    return WrittenSplits(counts, files, sum(writer.dropped_tokens for writer in writers.values()))


def _write_streams(
    shards: Shards,
    held_out: HeldOut,
    mixture: Mixture,
    writers: Mapping[str, RowWriter],
    counts: Sequence[TokenCounts],
) -> None:
    """Append each document to the streams it belongs to, and count it.

    The training stream has, in order, all documents that are written at least once, then those written a second time,
    and so on, one pass over the shards for each: copies of a document are as far apart as they can be.
    """
    long = {} if mixture.takes_all else _long_documents(shards())
    passes, done = 1, 0
    while done < passes:
        for shard, out, copies in _planned(shards(), held_out, mixture.anew(), long):
            taken = (copies > done) & ~out
            writers["train"].append(shard.ids[np.repeat(taken, shard.lengths)])
            _add(counts, shard, taken, "train")
            if "held_out" in writers and not done:
                writers["held_out"].append(shard.ids[np.repeat(out, shard.lengths)])
            passes = max(passes, int(copies.max(initial=0)))
        done += 1


def _check_not_empty(counts: Sequence[TokenCounts], config: PreprocessConfig) -> None:
    if not any(count.documents for count in counts):
        raise UserError(
            f"all {sum(count.empty_documents for count in counts)} documents of {', '.join(config.input[:3])} are "
            f"empty; give input with text in it"
        )


def _check_rows(writers: Mapping[str, RowWriter], counts: Sequence[TokenCounts], config: PreprocessConfig) -> None:
    for split, writer in writers.items():
        if not writer.rows:
            tokens = sum(getattr(count, f"{split}_tokens") for count in counts)
            raise UserError(
                f"the {split.replace('_', '-')} documents have {tokens} tokens, too few for one row of "
                f"seq_len + 1 = {config.seq_len + 1}; give more text, a smaller seq_len or another share held out"
            )


def _count(shards: Iterable[TokenShard], held_out: HeldOut, inputs: int) -> list[TokenCounts]:
    """Return each input's documents and tokens, all of them and those held out."""
    counts = [TokenCounts() for _ in range(inputs)]
    for shard in shards:
        _add(counts, shard, held_out.of(shard), "held_out")
        for count, tokens, documents, without in zip(
            counts,
            _by_source(shard, shard.lengths, inputs),
            _by_source(shard, shard.begins, inputs),
            _by_source(shard, shard.empty, inputs),
            strict=True,
        ):
            count.tokens += tokens
            count.documents += documents - without
            count.empty_documents += without
    return counts


def _long_documents(shards: Iterable[TokenShard]) -> dict[int, int]:
    """Return the tokens of each document that comes in more than one piece, by the document's number."""
    tokens: dict[int, int] = {}
    for shard in shards:
        documents = shard.documents
        for piece in np.flatnonzero(~(shard.begins & shard.ends)):
            document = int(documents[piece])
            tokens[document] = tokens.get(document, 0) + int(shard.lengths[piece])
    return tokens


def _planned(
    shards: Iterable[TokenShard], held_out: HeldOut, mixture: Mixture, long: Mapping[int, int]
) -> Iterator[tuple[TokenShard, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Yield each shard, which of its pieces are held out [pieces], and how often each piece is written [pieces]."""
    current = 0  # copies of the current document, decided at its first piece
    for shard in shards:
        out = held_out.of(shard)
        copies = np.ones(len(out), np.int64)
        if not mixture.takes_all:
            begins, documents = shard.begins, shard.documents
            for piece in np.flatnonzero(~(out | shard.empty)):
                source, tokens = int(shard.sources[piece]), int(shard.lengths[piece])
                if begins[piece]:
                    current = mixture.take(source, long.get(int(documents[piece]), tokens))
                copies[piece] = current
        yield shard, out, copies


def _add(counts: Sequence[TokenCounts], shard: TokenShard, taken: npt.NDArray[np.bool_], split: str) -> None:
    """Add the pieces `taken` of `shard` to the counts of `split`."""
    tokens = _by_source(shard, shard.lengths * taken, len(counts))
    documents = _by_source(shard, shard.begins & ~shard.empty & taken, len(counts))
    for count, more_tokens, more_documents in zip(counts, tokens, documents, strict=True):
        setattr(count, f"{split}_tokens", getattr(count, f"{split}_tokens") + more_tokens)
        setattr(count, f"{split}_documents", getattr(count, f"{split}_documents") + more_documents)


def _by_source(shard: TokenShard, values: npt.NDArray[np.integer | np.bool_], inputs: int) -> list[int]:
    """Return the sum of `values` [pieces] for each input."""
    return [int(total) for total in np.bincount(shard.sources, values, inputs)]
