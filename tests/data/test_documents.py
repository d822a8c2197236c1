"""Long documents in pieces: no text is lost at a cut, and byte-level tokens stay the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_core.errors import UserError
from femto_data import documents
from femto_data.documents import cut, read_pieces
from femto_data.tokenizer import draw_sample
from tests.data.making import contents, rows, run, sliced, stream, texts


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 200 characters, read 10 bytes at a time."""
    monkeypatch.setattr(documents, "LONGEST", 200)
    monkeypatch.setattr(documents, "_BLOCK", 10)


@given(chunks=st.lists(st.text(alphabet=" \n\r\tabé🙂", max_size=90), max_size=6))
@settings(max_examples=300, deadline=None)
def test_pieces_put_together_are_the_document_and_only_a_blank_document_is_one_blank_piece(chunks: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "LONGEST", 64)
        pieces = list(cut(chunks))
    whole = "".join(chunks)
    assert "".join(text for text, _ in pieces) == whole
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    if whole.strip():
        assert all(len(text) <= 64 for text, _ in pieces)
    else:
        assert len(pieces) == 1


def long_text(seed: int) -> str:
    chance = random.Random(seed)
    words = ["word", "it's", "x = f(1)", "日本", "(a)", "\n", "\n\n", "  ", "\t", ". ", "\r\n", "12345", " the", "The "]
    return "start " + " ".join(chance.choice(words) for _ in range(600)) + "end"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_long_documents_tokens_do_not_depend_on_where_it_was_cut(tmp_path: Path, workers: int) -> None:
    whole = [long_text(seed) for seed in range(6)]
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(whole):
        (folder / f"{number}.txt").write_bytes(text.encode())
    manifest = run(tmp_path, folder, workers=workers, vocab_size=600)
    assert rows(tmp_path / "out") == sliced(stream(tmp_path / "out", whole), 8)
    assert manifest.documents == len(whole)
    again = run(tmp_path, texts(tmp_path / "docs.jsonl", *whole), workers=workers, vocab_size=600)
    assert rows(tmp_path / "out") == sliced(stream(tmp_path / "out", whole), 8)
    assert again.tokens == manifest.tokens


@pytest.mark.usefixtures("short")
def test_a_long_document_that_spans_shards_is_held_out_or_weighed_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [long_text(seed) for seed in range(12)]
    one, two = texts(tmp_path / "a.jsonl", *whole[:6]), texts(tmp_path / "b.jsonl", *whole[6:])
    options = {"held_out": 0.3, "weights": (0.3, 0.7), "seed": 5}
    plain = run(tmp_path, one, two, **options)
    before = contents(tmp_path / "out")
    monkeypatch.setattr("femto_data.shards.CHARACTERS", 300)
    manifest = run(tmp_path, one, two, **options)
    assert manifest == plain
    assert contents(tmp_path / "out") == before
    assert 0 < sum(source.held_out_documents for source in manifest.sources) < 12


@pytest.mark.usefixtures("short")
def test_invalid_utf8_far_into_a_text_file_is_refused_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for spoilt, line in ((b"caf\xe9 au lait\n", 41), (b"\xf0\x9f\x99", 41)):
        file.write_bytes("ünïcode\n".encode() * 40 + spoilt)
        with pytest.raises(UserError, match=f"a.txt, line {line}: not valid UTF-8"):
            list(read_pieces([[file]], "text"))


def test_the_sample_is_all_there_is_or_evenly_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = texts(tmp_path / "a.jsonl", *(f"{i:04} " + "x" * 95 for i in range(1000)))
    assert len(draw_sample(read_pieces([[source]], "text"))) == 1000
    monkeypatch.setattr("femto_data.tokenizer._SAMPLE", 10_000)
    sample = draw_sample(read_pieces([[source]], "text"))
    assert len(sample) == 100
    assert sample == sorted(sample)
    places = [int(text[:4]) for text in sample]
    assert all(sum(start <= place < start + 250 for place in places) > 10 for start in range(0, 1000, 250))
