"""Packed rows through the loader: each once per epoch, in the same order for all loader settings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.config import Config, make_config
from femto_core.data import DistributedDataLoader, evaluation_batches, next_token_collator
from femto_core.errors import UserError
from femto_core.sampler import DistributedSampler
from femto_data.dataset import PackedDataset, RowWriter
from femto_data.plugin import check_tokenizer
from femto_data.tokenizer import tokenizer_fingerprint, train_tokenizer

pytestmark = [
    # Loader processes are forked; newer Pythons warn about a fork beside threads.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    # Four loader processes are more than a small machine has cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture
def ten(tmp_path: Path) -> PackedDataset:
    """Ten rows of 4 tokens; row i begins with 4 * i."""
    file = tmp_path / "train.safetensors"
    with RowWriter(file, seq_len=4, vocab_size=100, tokenizer_fingerprint="0" * 16, eos_id=0) as writer:
        writer.append(np.arange(41))
    return PackedDataset(file)


def loader(dataset: PackedDataset, *, workers: int, pin_memory: bool = False, **options: Any) -> DistributedDataLoader:
    sampler = DistributedSampler(
        rows=len(dataset),
        global_batch=2,
        micro_batch=1,
        size=1,
        rank=0,
        seed=3,
        shuffle=True,
        remainder="drop",
    )
    return DistributedDataLoader(
        dataset, sampler, next_token_collator, workers=workers, pin_memory=pin_memory, **options
    )


def numbers(batches: list[Batch]) -> list[int]:
    return [int(row) // 4 for batch in batches for row in batch.input_ids[:, 0]]


def test_ten_rows_with_four_workers_are_ten_rows(ten: PackedDataset) -> None:
    one = loader(ten, workers=4)
    for _ in range(3):
        seen = [row for _ in range(one.sampler.steps_per_epoch) for row in numbers(one.next_step())]
        assert Counter(seen) == Counter(range(10))
    one.close()


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 2), (1, 1), (2, 1), (2, 7), (4, 3)])
def test_workers_and_prefetch_change_nothing_but_the_time(ten: PackedDataset, workers: int, prefetch: int) -> None:
    plain, one = loader(ten, workers=0), loader(ten, workers=workers, prefetch=prefetch)
    for _ in range(12):
        assert numbers(one.next_step()) == numbers(plain.next_step())
    one.load_state_dict({"step": 4})
    plain.load_state_dict({"step": 4})
    assert numbers(one.next_step()) == numbers(plain.next_step())
    one.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_the_same_batches(ten: PackedDataset, workers: int) -> None:
    plain, one = loader(ten, workers=0), loader(ten, workers=workers, pin_memory=True)
    for _ in range(12):
        batches = one.next_step()
        assert all(batch.input_ids.is_pinned() and batch.targets.is_pinned() for batch in batches)
        assert numbers(batches) == numbers(plain.next_step())
    one.close()


def test_workers_live_until_the_loader_is_closed(ten: PackedDataset) -> None:
    one = loader(ten, workers=2)
    one.next_step()
    before = [worker.pid for worker in one._iterator._workers]  # type: ignore[attr-defined]
    for _ in range(11):  # past two ends of an epoch
        one.next_step()
    assert [worker.pid for worker in one._iterator._workers] == before  # type: ignore[attr-defined]
    one.close()


@pytest.mark.parametrize("prefetch", [0, -1])
def test_a_prefetch_that_is_none_is_refused(prefetch: int) -> None:
    assert make_config(Config, {"data": {"prefetch": 3}}, {}).data.prefetch == 3
    with pytest.raises(UserError, match=r"data.prefetch = .*must be greater than 0"):
        make_config(Config, {"data": {"prefetch": prefetch}}, {})


def test_five_rows_on_two_ranks_evaluate_as_five_rows(ten: PackedDataset) -> None:
    rows = [
        int(tokens[0]) // 4
        for rank in range(2)
        for batch in evaluation_batches(ten, next_token_collator, rows=5, micro_batch=2, size=2, rank=rank)
        for tokens, targets in zip(batch.input_ids, batch.targets, strict=True)
        if (targets != IGNORE_INDEX).any()
    ]
    assert sorted(rows) == [0, 1, 2, 3, 4]


def test_fewer_rows_than_ranks_are_refused(ten: PackedDataset) -> None:
    with pytest.raises(UserError, match="10 rows"):
        DistributedSampler(
            rows=len(ten),
            global_batch=16,
            micro_batch=1,
            size=16,
            rank=0,
            seed=0,
            shuffle=True,
            remainder="pad",
        )


def test_rows_go_with_a_model_of_the_same_tokenizer_and_with_one_that_has_none(tmp_path: Path) -> None:
    check_tokenizer(tmp_path, "0" * 16)
    tokenizer = train_tokenizer(["some text"], 300)
    tokenizer.save_pretrained(tmp_path)
    check_tokenizer(tmp_path, tokenizer_fingerprint(tokenizer))
    with pytest.raises(UserError, match="the data was written with another tokenizer"):
        check_tokenizer(tmp_path, "0" * 16)


def test_a_model_with_a_damaged_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    train_tokenizer(["some text"], 300).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"{tmp_path}/tokenizer.json is damaged") as caught:
        check_tokenizer(tmp_path, "0" * 16)
    assert "\n" not in str(caught.value)
