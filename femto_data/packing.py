"""Tokenised documents to rows: which documents are held out, how often the others are taken, and what that makes."""

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
from femto_data.shards import Shard


@attrs.frozen
class HeldOut:
    """The choice of held-out documents: it hangs on the seed and the document's number, on nothing around it."""

    share: float
    seed: int

    def __call__(self, document: int) -> bool:
        """Whether `document` is held out."""
        digest = hashlib.blake2b(f"{self.seed}:{document}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64

    def of(self, shard: Shard) -> npt.NDArray[np.bool_]:
        """Whether each piece's document is held out [pieces]."""
        documents = shard.documents
        if not self.share:
            return np.zeros(len(documents), np.bool_)
        first, last = int(documents[0]), int(documents[-1])
        chosen = np.asarray([self(document) for document in range(first, last + 1)])
        return chosen[documents - first]


@attrs.define
class Counts:
    """Documents and tokens of one input."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    held_out_documents: int = 0
    held_out_tokens: int = 0
    train_documents: int = 0
    """As written: one that is taken twice counts twice."""
    train_tokens: int = 0


@attrs.frozen
class Packed:
    """What `pack` wrote."""

    counts: Sequence[Counts]
    files: Sequence[RowsFile]
    dropped_tokens: int


def pack(
    shards: Callable[[], Iterable[Shard]],
    config: PreprocessConfig,
    directory: Path,
    *,
    vocab_size: int,
    fingerprint: str,
    eos_id: int,
) -> Packed:
    """Write train.safetensors and, where documents are held out, held_out.safetensors into `directory`.

    `shards` is called once for each reading. The training stream has all documents that are taken at least once, in
    order, then those taken a second time, and so on: copies are as far apart as they can be.
    Raises UserError where all documents are empty or a file would have no row.
    """
    held_out = HeldOut(config.held_out, config.seed)
    counts = _count(shards(), held_out, len(config.input))
    if not any(count.documents for count in counts):
        raise UserError(
            f"all {sum(count.empty_documents for count in counts)} documents of {', '.join(config.input[:3])} are "
            f"empty; give input with text in it"
        )
    available = [count.tokens - count.held_out_tokens for count in counts]
    mixture = Mixture(ratios(config.weights, available, config.input))
    long = _long_documents(shards()) if config.weights else {}

    def writer(name: str) -> RowWriter:
        return RowWriter(
            directory / f"{name}.safetensors",
            seq_len=config.seq_len,
            vocab_size=vocab_size,
            tokenizer_fingerprint=fingerprint,
            eos_id=eos_id,
        )

    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writer(name)) for name in ("train", "held_out")[: 2 if config.held_out else 1]]
        passes, done = 1, 0
        while done < passes:
            for shard, out, copies in _planned(shards(), held_out, mixture.anew(), long):
                taken = (copies > done) & ~out
                writers[0].append(shard.ids[np.repeat(taken, shard.lengths)])
                _add(counts, shard, taken, "train")
                if config.held_out and not done:
                    writers[1].append(shard.ids[np.repeat(out, shard.lengths)])
                passes = max(passes, int(copies.max(initial=0)))
            done += 1
        for one, split in zip(writers, ("train", "held_out"), strict=False):
            if not one.rows:
                tokens = sum(getattr(count, f"{split}_tokens") for count in counts)
                raise UserError(
                    f"the {split.replace('_', '-')} documents have {tokens} tokens, too few for one row of "
                    f"seq_len + 1 = {config.seq_len + 1}; give more text, a smaller seq_len or another share held out"
                )
    return Packed(counts, [one.record() for one in writers], sum(one.dropped_tokens for one in writers))


def _count(shards: Iterable[Shard], held_out: HeldOut, inputs: int) -> list[Counts]:
    counts = [Counts() for _ in range(inputs)]
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


def _long_documents(shards: Iterable[Shard]) -> dict[int, int]:
    """Return the tokens of each document that comes in more than one piece, by its number."""
    tokens: dict[int, int] = {}
    for shard in shards:
        documents = shard.documents
        for piece in np.flatnonzero(~(shard.begins & shard.ends)):
            document = int(documents[piece])
            tokens[document] = tokens.get(document, 0) + int(shard.lengths[piece])
    return tokens


def _planned(
    shards: Iterable[Shard], held_out: HeldOut, mixture: Mixture, long: Mapping[int, int]
) -> Iterator[tuple[Shard, npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Yield each shard, which of its pieces are held out, and how often the others are taken [pieces]."""
    current = 0  # copies of the document that a piece belongs to: decided at its first piece
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


def _add(counts: Sequence[Counts], shard: Shard, taken: npt.NDArray[np.bool_], split: str) -> None:
    """Add the pieces `taken` of `shard` to the counts of `split`."""
    tokens = _by_source(shard, shard.lengths * taken, len(counts))
    documents = _by_source(shard, shard.begins & ~shard.empty & taken, len(counts))
    for count, more_tokens, more_documents in zip(counts, tokens, documents, strict=True):
        setattr(count, f"{split}_tokens", getattr(count, f"{split}_tokens") + more_tokens)
        setattr(count, f"{split}_documents", getattr(count, f"{split}_documents") + more_documents)


def _by_source(shard: Shard, values: npt.NDArray[np.integer | np.bool_], inputs: int) -> list[int]:
    """Return the sum of `values` [pieces] for each input."""
    return [int(total) for total in np.bincount(shard.sources, values, inputs)]
