"""Rows and batches: isolated documents, policies for over-long conversations, held-out conversations, determinism."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.data import DistributedDataLoader, evaluation_batches
from femto_core.sampler import DistributedSampler
from femto_sft.collator import collate
from femto_sft.filter_report import ConversationCounts
from femto_sft.prepare import cut, write_rows
from femto_sft.rows import ConversationRows, Row, read_manifest
from femto_sft.section import SFTSection
from femto_sft.tokens import Tokens
from tests.sft import making
from tests.sft.making import log_of, make_tokenizer, refusal, rows_of, said, talk, write_lines


def document(length: int, start: int = 0, trained: bool = True) -> Tokens:
    return Tokens(np.arange(start, start + length, dtype=np.int32), np.full(length, trained), (length,))


def batch_of(lengths: tuple[int, ...], trained: bool = True) -> Batch:
    total = sum(lengths)
    return collate([Row(torch.arange(10, 10 + total), torch.full((total,), trained), lengths)])


# Batches.


def test_targets_and_positions_end_with_each_document() -> None:
    batch = batch_of((3, 1, 2))
    assert batch.targets.tolist() == [[11, 12, IGNORE_INDEX, IGNORE_INDEX, 15, IGNORE_INDEX]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_target_is_the_next_trained_token_of_its_own_document(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    ids, trained = random.integers(0, 99, total), random.random(total) < 0.5
    batch = collate([Row(torch.from_numpy(ids), torch.from_numpy(trained), tuple(lengths))])
    starts = np.cumsum([0, *lengths])
    for start, stop in itertools.pairwise(starts):
        for i in range(start, stop):
            learns = i + 1 < stop and trained[i + 1]
            assert batch.targets[0, i] == (ids[i + 1] if learns else IGNORE_INDEX)
            assert batch.position_ids[0, i] == i - start


@pytest.mark.parametrize("seq_len", [1, 7, 8, 31, 33, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_all_parts_of_a_batch_keep_one_length_for_any_cutoff(tmp_path: Path, seq_len: int, overlong: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", *(talk(i, i + 1) for i in range(8)))
    if seq_len == 1 or (seq_len < 9 and overlong != "split"):
        assert "nothing to train on" in refusal(tmp_path, file, seq_len=seq_len, overlong=overlong)
        return
    rows = rows_of(tmp_path, file, seq_len=seq_len, overlong=overlong)
    batch = collate([rows[i] for i in range(len(rows))])
    parts = (batch.input_ids, batch.targets, batch.position_ids)
    assert all(part.shape == (len(rows), seq_len) and part.dtype == torch.int64 for part in parts)
    assert batch.valid == read_manifest(rows.directory)["counts"]["trained_tokens"] > 0


def test_padding_is_a_document_of_its_own_that_is_not_trained(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1)), seq_len=128)
    row, batch = rows[0], collate([rows[0]])
    end = row.lengths[0]
    eos = make_tokenizer().eos_token_id
    assert row.lengths == (end, 128 - end)
    assert (batch.input_ids[0, end:] == eos).all()
    assert (batch.targets[0, end - 1 :] == IGNORE_INDEX).all()
    assert batch.position_ids[0, end:].tolist() == list(range(128 - end))


def test_where_padding_is_eos_the_end_of_turn_keeps_its_label(tmp_path: Path) -> None:
    making.save_tokenizer(tmp_path / "tokenizer", making.PLAIN_CHATML.replace("<|im_end|>", "{{ eos_token }}"))
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1), talk(2)), seq_len=128)
    batch = collate([rows[0]])
    eos = make_tokenizer().eos_token_id
    assert int((batch.targets == eos).sum()) == 2
    assert int((batch.input_ids == eos).sum()) > 4


# Over-long conversations.


@pytest.mark.parametrize(
    ("policy", "lengths", "lost"), [("drop", [1, 2, 3], 4), ("truncate", [1, 2, 3], 4), ("split", [1, 2, 2, 3, 3], 0)]
)
def test_lengths_four_two_three_one_in_rows_of_three(
    tmp_path: Path, policy: Any, lengths: list[int], lost: int
) -> None:
    counts = ConversationCounts()
    talks = [document(4, 10), document(2, 20), document(3, 30), document(1, 40)]
    settings = SFTSection(overlong=policy, held_out=0.0)
    written = write_rows(iter(talks), tmp_path, 3, settings, counts)
    found = sorted(np.diff(np.fromfile(tmp_path / "starts", "<i8")).tolist())
    # The piece of length 1 has no target, and is not written.
    assert found == [length for length in lengths if length > 1]
    assert counts.overlong == 1
    assert counts.dropped == (policy != "split")
    assert counts.lost_tokens == lost
    assert written.files["tokens"] == sum(found)
    assert any("over-long" in line for line in counts.lines(policy, ["here"]))


@given(st.integers(2, 20), st.integers(2, 99), st.integers(0, 2**32))
def test_split_pieces_train_every_token_that_can_be_once(length: int, total: int, seed: int) -> None:
    trained = np.random.default_rng(seed).random(total) < 0.3
    tokens = Tokens(np.arange(total, dtype=np.int32), trained)
    counts = ConversationCounts()
    pieces = cut(tokens, length, SFTSection(overlong="split"), counts)
    assert all(len(piece) <= length and piece.learnable for piece in pieces)
    learnt = [token for piece in pieces for token in piece.ids[1:][piece.trained[1:]].tolist()]
    assert learnt == [token for token in range(1, total) if trained[token]]
    kept = {token for piece in pieces for token in piece.ids.tolist()}
    assert counts.lost_tokens == (total - len(kept) if total > length else 0)


def test_truncation_cuts_behind_the_last_answer_that_fits(tmp_path: Path) -> None:
    turns = [turn for number in range(9) for turn in (("user", f"say {number}"), ("assistant", f"{number}"))]
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", said(*turns)), seq_len=128, overlong="truncate")
    [text] = making.texts(rows)
    assert text.endswith("<|im_end|>")
    assert 0 < text.count("<|im_start|>assistant") == text.count("<|im_end|>") // 2 < 9
    assert "1 over-long conversations cut at a turn" in log_of(rows, "a.jsonl")


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
def test_a_long_question_and_a_short_answer_have_nothing_to_learn_in_a_short_row(tmp_path: Path, overlong: str) -> None:
    long = said(("user", "q" * 200), ("assistant", "yes"))
    file = write_lines(tmp_path / "a.jsonl", long)
    if overlong == "split":  # only the last piece has the answer, so only it is kept
        rows = rows_of(tmp_path, file, overlong=overlong)
        assert collate([rows[0]]).valid == 2, "yes and its end of turn"
        assert "pieces without anything to learn left out" in log_of(rows, file)
        return
    assert "1 over-long conversations" in refusal(tmp_path, file, overlong=overlong)
    rows = rows_of(tmp_path / "b", write_lines(tmp_path / "b.jsonl", long, talk(1)), overlong=overlong)
    counts = read_manifest(rows.directory)["counts"]
    assert (counts["overlong"], counts["dropped"], counts["kept"]) == (1, 1, 1)


# Held-out conversations.


def test_a_share_is_held_out_and_copies_stay_on_one_side(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", *(talk(i % 100) for i in range(300)))
    rows = rows_of(tmp_path, file, held_out=0.3)
    train, held_out = set(making.texts(rows)), set(making.texts(ConversationRows(rows.directory, "held_out")))
    assert len(train) + len(held_out) == 100
    assert train.isdisjoint(held_out)
    assert 15 < len(held_out) < 45


def test_without_a_share_nothing_is_held_out(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1)))
    assert len(ConversationRows(rows.directory, "held_out")) == 0


# Through loader and evaluation.


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_each_row_once_an_epoch(tmp_path: Path, workers: int) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", *(talk(i) for i in range(5))), packing="pad")
    sampler = DistributedSampler(
        rows=5, global_batch=2, micro_batch=2, size=1, rank=0, seed=0, shuffle=True, remainder="pad"
    )
    loader = DistributedDataLoader(rows, sampler, collate, workers=workers, pin_memory=False)
    valid = sum(batch.valid for _ in range(sampler.steps_per_epoch) for batch in loader.next_step())
    loader.close()
    assert valid == read_manifest(rows.directory)["counts"]["trained_tokens"]


def test_five_rows_on_two_ranks_evaluate_as_five_rows(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", *(talk(i) for i in range(5))), packing="pad")
    valid = sum(
        batch.valid
        for rank in range(2)
        for batch in evaluation_batches(rows, collate, rows=5, micro_batch=2, size=2, rank=rank)
    )
    assert valid == read_manifest(rows.directory)["counts"]["trained_tokens"]


def test_rows_pickle_as_their_path(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1)))
    again = pickle.loads(pickle.dumps(rows))
    assert torch.equal(again[0].ids, rows[0].ids)
    assert len(pickle.dumps(rows)) < 500


@pytest.mark.parametrize("index", [-1, 1])
def test_there_are_no_other_rows(tmp_path: Path, index: int) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1)))
    with pytest.raises(IndexError):
        rows[index]


def test_the_largest_id_is_that_of_the_conversations_and_of_padding(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", *map(talk, range(20))), held_out=0.3)
    splits = (rows, ConversationRows(rows.directory, "held_out"))
    found = max(int(split[index].ids.max()) for split in splits for index in range(len(split)))
    assert rows.largest_id() == found
