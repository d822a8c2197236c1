"""Documents read from files, one after another, in pieces of bounded size.

Local files are read here rather than by the datasets library, so that an error can name the file and the line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from femto_core.errors import UserError
from femto_data.files import JSON_LINES, PARQUET, json_lines, open_parquet

LONGEST = 2**20  # most characters of a document that are tokenised at once
_BLOCK = 2**20  # bytes of a text file that are read at once
_ROWS = 64  # rows of a Parquet file that are read at once


class TextPiece(NamedTuple):
    """A document, or a part of a long document."""

    source: int
    """Number of the input that the document came from."""
    document: int
    """Number of the document among all documents, including empty ones."""
    text: str
    first: bool
    last: bool


def read_pieces(files: Sequence[Sequence[Path]], text_key: str) -> Iterator[TextPiece]:
    """Yield the documents of all inputs' `files` in order. Memory holds one piece, JSON line or Parquet page.

    A document of more than 2^20 characters comes in pieces of at least half that size. It is cut after the end of a
    line or, where no line ends, before a space. Pre-tokenizers cut there too, so byte-level tokens stay the same. They
    may differ in a document without lines and spaces, or if the tokenizer treats the start of a text specially.
    """
    number = 0
    for source, of_source in enumerate(files):
        for file in of_source:
            for chunks in _read(file, text_key):
                first = True
                for text, last in cut(chunks):
                    yield TextPiece(source, number, text, first, last)
                    first = False
                number += 1


def cut(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is the last) for the pieces, of at most `LONGEST` characters, of one document.

    `chunks` are the document's text in order. White space at the beginning stays in the first piece with other text,
    so only a blank document has a blank first piece.
    """
    rest, blank = "", True
    for chunk in chunks:
        text, start = rest + chunk, 0
        blank = blank and (not text or text.isspace())
        while len(text) - start > LONGEST and not blank:
            end = _place_to_cut(text, start, start + LONGEST)
            yield text[start:end], False
            start = end
        rest = text[start:]
    yield rest, True


def _place_to_cut(text: str, start: int, limit: int) -> int:
    """Return where the piece that begins at `start` ends: between two words shortly before `limit`, or at `limit`."""
    for mark, offset in (("\n", 1), (" ", 0)):
        place = text.rfind(mark, start + 1, limit - 1)
        while place > max(start, limit - LONGEST // 2):
            if not text[place - 1].isspace() and not text[place + 1].isspace():
                return place + offset
            place = text.rfind(mark, start + 1, place)
    return limit


def _read(file: Path, text_key: str) -> Iterator[Iterable[str]]:
    name = file.name.lower()
    if name.endswith(JSON_LINES):
        return ((text,) for text in _read_json_lines(file, text_key))
    if name.endswith(PARQUET):
        return ((text,) for text in _read_parquet(file, text_key))
    return iter([_read_text(file)])


def _read_json_lines(file: Path, text_key: str) -> Iterator[str]:
    """Yield the text of every line's object. Blank lines are skipped; lines without an object raise UserError."""
    for number, found in json_lines(file):
        where = f"{file}, line {number}"
        if isinstance(found, str):
            raise UserError(f"{where}: {found}; every line must hold one JSON object in UTF-8")
        if found is not None:
            yield text_of(found, text_key, where)


def _read_parquet(file: Path, text_key: str) -> Iterator[str]:
    with open_parquet(file) as table:
        columns = table.schema_arrow.names
        if text_key not in columns:
            raise UserError(_no_key(str(file), text_key, columns))
        number = 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=[text_key]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield text_of({text_key: value}, text_key, f"{file}, row {number}")


def _read_text(file: Path) -> Iterator[str]:
    """Yield the whole file in blocks, with its line endings but without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines = 1
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                text = decoder.decode(block)
                lines += text.count("\n")
                yield text
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line = lines + error.object[: error.start].count(b"\n")
        raise UserError(f"{file}, line {line}: not valid UTF-8; correct the file or leave it out") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); make it readable or leave it out") from error


def text_of(row: Mapping[str, Any], text_key: str, where: str) -> str:
    """Return the text of `row` under `text_key`. Raises UserError, which begins with `where`, if there is no text."""
    if text_key not in row:
        raise UserError(_no_key(where, text_key, list(row)))
    text = row[text_key]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: {text_key!r} holds {json.dumps(text, default=str)[:40]}, not text; correct it or use another key"
        )
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise UserError(
            f"{where}: {text_key!r} holds half of a surrogate pair, which is not valid text; correct or remove it"
        )
    return text


def _no_key(where: str, text_key: str, keys: list[str]) -> str:
    return f"{where}: no {text_key!r} among the keys {', '.join(map(repr, keys))}; name the text's by --text-key"
