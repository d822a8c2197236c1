"""Weights: documents are repeated or left out so that each input has its share of the training tokens, reproducibly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_data.mixture import Mixture, ratios
from tests.data.making import contents, decoded, refusal, rows, run, texts

A = [f"alpha {i} " + "x" * (i % 23) for i in range(120)]
B = [f"beta {i} " + "y" * (i % 17) for i in range(60)]


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    return texts(tmp_path / "a.jsonl", *A), texts(tmp_path / "b.jsonl", *B)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    ratio=st.floats(0.01, 7),
)
@settings(max_examples=200, deadline=None)
def test_at_every_document_what_was_taken_is_near_its_ratio_of_what_was_seen(lengths: list[int], ratio: float) -> None:
    mixture = Mixture([1.0, ratio])
    seen = taken = 0
    for length in lengths:
        copies = mixture.take(1, length)
        seen += length
        taken += copies * length
        assert abs(taken - ratio * seen) <= max(lengths) / 2 + 1e-6
        assert mixture.take(0, 5) == 1


def test_the_number_of_tokens_stays_and_the_sum_of_weights_does_not_matter() -> None:
    assert ratios((7, 3), (500, 500), ("a", "b")) == pytest.approx([1.4, 0.6])
    assert ratios((0.7, 0.3), (500, 500), ("a", "b")) == pytest.approx([1.4, 0.6])
    assert ratios((), (500, 20), ("a", "b")) == [1.0, 1.0]


@pytest.mark.parametrize("weights", [(0.3, 0.7), (0.5, 0.5), (0.95, 0.05), (3.0, 1.0)])
def test_each_input_gets_its_share_of_the_tokens(
    tmp_path: Path, sources: tuple[Path, Path], weights: tuple[float, float]
) -> None:
    manifest = run(tmp_path, *sources, weights=weights, seq_len=1)
    for one, weight in zip(manifest.sources, weights, strict=True):
        assert one.weight == pytest.approx(weight / sum(weights))
        assert one.train_tokens / manifest.train_tokens == pytest.approx(one.weight, abs=0.01)
    assert manifest.train_tokens == pytest.approx(manifest.tokens, rel=0.02)
    found = Counter(decoded(tmp_path / "out").split("<|endoftext|>"))
    for one, documents in zip(manifest.sources, (A, B), strict=True):
        counts = [found[document] for document in documents]
        assert sum(counts) == one.train_documents
        assert max(counts) - min(counts) <= 2
        assert (one.documents, one.empty_documents) == (len(documents), 0)


def test_copies_are_in_passes_and_a_document_never_follows_itself(tmp_path: Path, sources: tuple[Path, Path]) -> None:
    run(tmp_path, *sources, weights=(0.2, 0.8), seq_len=1)
    found = decoded(tmp_path / "out").split("<|endoftext|>")
    assert all(found[i] != found[i + 1] for i in range(len(found) - 1))
    last = {document: place for place, document in enumerate(found)}
    first = {document: len(found) - 1 - place for place, document in enumerate(reversed(found))}
    assert min(last[document] - first[document] for document in B) > len(B) // 2


def test_held_out_documents_come_once_and_are_in_no_training_row(tmp_path: Path, sources: tuple[Path, Path]) -> None:
    manifest = run(tmp_path, *sources, weights=(0.2, 0.8), held_out=0.2, seq_len=1)
    train, held_out = (decoded(tmp_path / "out", name).split("<|endoftext|>") for name in ("train", "held_out"))
    assert not set(train) & set(held_out)
    assert len(held_out) == len(set(held_out)) == sum(one.held_out_documents for one in manifest.sources)
    assert manifest.held_out_tokens == sum(one.held_out_tokens for one in manifest.sources)
    run(tmp_path, *sources, held_out=0.2, seq_len=1)
    assert decoded(tmp_path / "out", "held_out").split("<|endoftext|>") == held_out


def test_weights_of_the_shares_there_are_change_nothing(tmp_path: Path, sources: tuple[Path, Path]) -> None:
    plain = run(tmp_path, *sources)
    before = rows(tmp_path / "out")
    shares = tuple(float(one.tokens) for one in plain.sources)
    assert run(tmp_path, *sources, weights=shares).train_tokens == plain.tokens
    assert rows(tmp_path / "out") == before


def test_the_mixture_is_the_same_to_the_byte_for_any_number_of_workers_and_any_cut_into_shards(
    tmp_path: Path, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, *sources, weights=(0.3, 0.7), held_out=0.1)
    before = contents(tmp_path / "out")
    monkeypatch.setattr("femto_data.shards.CHARACTERS", 500)
    run(tmp_path, *sources, weights=(0.3, 0.7), held_out=0.1, workers=2)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("weights", [(0.1, 0.9), (0.5, 0.5), (0.9, 0.1)])
def test_long_documents_are_taken_and_left_out_whole_and_as_evenly_as_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: tuple[float, float]
) -> None:
    monkeypatch.setattr("femto_data.documents.LONGEST", 64)  # a document has about ten pieces
    monkeypatch.setattr("femto_data.shards.CHARACTERS", 1000)  # a document's pieces are in two shards
    long = [f"long {i} " + " ".join(f"w{i}x{j}" for j in range(80 + i)) for i in range(24)]
    manifest = run(
        tmp_path, texts(tmp_path / "a.jsonl", *A), texts(tmp_path / "l.jsonl", *long), weights=weights, seq_len=1
    )
    found = Counter(decoded(tmp_path / "out").split("<|endoftext|>"))
    for documents in (A, long):
        counts = [found[document] for document in documents]
        assert max(counts) - min(counts) <= 1
    assert sum(found[document] for document in long) == manifest.sources[1].train_documents
    share = manifest.sources[1].train_tokens / manifest.train_tokens
    longest = max(len(document) for document in long)
    assert abs(share - weights[1]) * manifest.train_tokens <= longest


def test_an_input_with_nothing_to_repeat_is_refused(tmp_path: Path, sources: tuple[Path, Path]) -> None:
    empty = texts(tmp_path / "c.jsonl", "", " ")
    words = f"input {empty} has no training tokens to give a weight; leave it out"
    assert refusal(tmp_path, sources[0], empty, weights=(0.5, 0.5)) == words


def test_counts_and_digests_of_each_input_are_recorded(tmp_path: Path) -> None:
    import hashlib

    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(f"text of {name}")
    (folder / "none.txt").write_text(" ")
    source = texts(tmp_path / "a.jsonl", *A[:10], "")
    manifest = run(tmp_path, folder, source)
    assert [(one.files, one.documents, one.empty_documents) for one in manifest.sources] == [(3, 2, 1), (1, 10, 1)]
    assert manifest.tokens == sum(one.tokens for one in manifest.sources) == manifest.train_tokens
    listed = [json.loads(line) for line in (tmp_path / "out/sources.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in listed] == [
        *(str(folder / name) for name in ("none.txt", "one.txt", "two.txt")),
        str(source),
    ]
    for entry in listed:
        data = Path(entry["file"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    first = hashlib.sha256("".join(entry["sha256"] for entry in listed[:3]).encode()).hexdigest()
    assert manifest.sources[0].sha256 == first
