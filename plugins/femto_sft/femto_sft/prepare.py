"""From sources to packed rows: read conversations, encode, cut, hold out, pack, write."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import xxhash

from femto_core.errors import UserError
from femto_sft.conversation import Conversation, NoConversation, Problem
from femto_sft.encoder import Encoder
from femto_sft.filter_report import ConversationCounts
from femto_sft.formats import FORMATS, Format, read_row, recognise
from femto_sft.packing import PACKINGS
from femto_sft.rows import DTYPES, SPLITS
from femto_sft.section import SFTSection
from femto_sft.sources import ConversationSource
from femto_sft.tokens import Tokens, fit

_TOGETHER = 256  # conversations encoded at once


@attrs.frozen
class Found:
    """A conversation, or the problem with a row, and its place in the sources."""

    source: int
    """Number of the source."""
    name: str
    """Name of the source."""
    place: str
    """Place in the source, such as "line 3"."""
    conversation: Conversation | Problem

    @property
    def where(self) -> str:
        """Source and place, as error sentences begin."""
        return f"{self.name}, {self.place}"


@attrs.define
class Reader:
    """Reads sources in order, and records their formats and unused keys."""

    sources: Sequence[ConversationSource]
    format: str
    counts: ConversationCounts
    formats: list[str] = attrs.field(factory=list)
    """Format of each source read so far; empty for a source without rows."""
    unread: Counter[str] = attrs.field(factory=Counter)
    """Keys of rows that are not read, with the number of rows that have them."""

    def read(self) -> Iterator[Found]:
        """Yield all rows but blank lines. Raises `UserError` for a source in an unknown format."""
        for number, source in enumerate(self.sources):
            self.formats.append("")
            format: Format | None = None  # noqa: A001 - it is what is meant
            for line in source.lines():
                found = functools.partial(Found, number, source.name, line.place)
                if line.row is None:
                    self.counts.blank += 1
                    continue
                if isinstance(line.row, Problem):
                    yield found(line.row)
                    continue
                if not line.row:  # an empty object does not show the format
                    yield found(Conversation(()))
                    continue
                if format is None:
                    format = FORMATS[self.format] if self.format != "auto" else recognise(line.row)  # noqa: A001
                    if format is None:
                        formats = "; ".join(f"{f.name}: {' and '.join(f.keys)}" for f in FORMATS.values())
                        keys = (f"{key!r}{' (null)' * (value is None)}" for key, value in line.row.items())
                        raise UserError(
                            f"{source.name}, {line.place}: the keys {', '.join(keys)} match no known format "
                            f"({formats}); rename them, or set sft.format"
                        )
                    self.formats[-1] = format.name
                known = (*format.keys, *format.more)
                self.unread.update(str(k) for k, value in line.row.items() if value is not None and k not in known)
                try:
                    yield found(read_row(line.row, format))
                except NoConversation as error:
                    yield found(Problem(str(error)))


def encode_all(
    found: Iterator[Found], encoder: Encoder, counts: ConversationCounts, section: SFTSection
) -> Iterator[Tokens]:
    """Yield the tokens of every usable conversation; an unusable row raises `UserError` or is skipped and counted."""
    while together := list(itertools.islice(found, _TOGETHER)):
        # A conversation without turns is not rendered: it has nothing to learn.
        usable = [c for f in together if isinstance(c := f.conversation, Conversation) and c.turns]
        encoded = iter(encoder.encode(usable))
        for one in together:
            counts.read += 1
            result = one.conversation
            tokens = next(encoded) if isinstance(result, Conversation) and result.turns else result
            if isinstance(tokens, Problem):
                if section.malformed == "refuse":
                    raise UserError(f"{one.where}: {tokens.reason}; correct it, or set --sft.malformed skip")
                if not counts.malformed:
                    counts.first_malformed = one.source, f"{one.place}: {tokens.reason}"
                counts.malformed += 1
            elif isinstance(tokens, Tokens) and tokens.learnable:
                yield tokens
            else:
                counts.nothing_to_learn += 1


def is_held_out(tokens: Tokens, share: float) -> bool:
    """Whether a conversation is held out. A hash of its tokens decides, so all copies are in the same split."""
    return xxhash.xxh3_64_intdigest(tokens.ids.tobytes()) < share * 2**64


def cut(tokens: Tokens, seq_len: int, section: SFTSection, counts: ConversationCounts) -> list[Tokens]:
    """Return the documents that a conversation becomes, none if it is left out, and count what is lost."""
    pieces = fit(tokens, seq_len, section.overlong)
    documents = [piece for piece in pieces if piece.learnable]
    if len(tokens) > seq_len:
        counts.overlong += 1
        useful = [piece.learnable > 0 for piece in pieces]
        shared = sum(map(operator.and_, useful, useful[1:]))  # neighbouring pieces have a token in common
        counts.lost_pieces += len(pieces) - len(documents) if section.overlong == "split" else 0
        counts.lost_tokens += len(tokens) - sum(map(len, documents)) + shared
        counts.dropped += not documents
    return documents


@attrs.frozen
class Written:
    """What `write_rows` wrote."""

    files: dict[str, int]
    """Number of elements in each file."""
    rows: dict[str, int]
    fill: dict[str, float]
    """Share of the rows' places that are not padding."""
    ends: list[int]
    """Ids of the tokens that end trained turns, the most frequent first."""


def write_rows(
    conversations: Iterator[Tokens], directory: Path, seq_len: int, section: SFTSection, counts: ConversationCounts
) -> Written:
    """Write the packed rows of all `conversations` into `directory`. Memory holds a few numbers per document."""
    lengths: list[int] = []
    ends: Counter[int] = Counter()
    members: dict[str, list[int]] = {split: [] for split in SPLITS}
    with contextlib.ExitStack() as stack:
        streams = {name: stack.enter_context((directory / name).open("wb")) for name in ("tokens", "trained")}
        for tokens in conversations:
            documents = cut(tokens, seq_len, section, counts)
            if not documents:
                continue
            split = SPLITS[is_held_out(tokens, section.held_out)]
            counts.kept += 1
            ends.update(tokens.ends)
            counts.held_out += split == "held_out"
            for document in documents:
                members[split].append(len(lengths))
                lengths.append(len(document))
                streams["tokens"].write(document.ids.astype(DTYPES["tokens"]).tobytes())
                streams["trained"].write(document.trained.astype(DTYPES["trained"]).tobytes())
                counts.trained_tokens += document.learnable
    counts.documents, counts.tokens = len(lengths), sum(lengths)
    files = {"tokens": counts.tokens, "trained": counts.tokens}
    rows, fill = {}, {}

    def write(name: str, values: Sequence[int]) -> None:
        (directory / name).write_bytes(np.asarray(values, "<i8").tobytes())  # tofile does not say why it fails
        files[name] = len(values)

    write("starts", list(itertools.accumulate(lengths, initial=0)))
    for split, documents_of in members.items():
        packed = PACKINGS[section.packing]([lengths[i] for i in documents_of], seq_len)
        write(f"{split}.documents", [documents_of[i] for row in packed for i in row])
        write(f"{split}.rows", list(itertools.accumulate(map(len, packed), initial=0)))
        rows[split] = len(packed)
        fill[split] = sum(lengths[i] for i in documents_of) / max(1, len(packed) * seq_len)
    return Written(files, rows, fill, [token for token, _ in ends.most_common()])
