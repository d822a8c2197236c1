"""Packing: no item lost, no row overfull, few rows, reproducible, and fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from femto_core.config import Config, config_class, make_config
from femto_core.errors import UserError
from femto_core.model import FullModel
from femto_sft.packing import PACKINGS, Rows, best_fit_decreasing, first_fit_decreasing
from femto_sft.plugin import SupervisedFineTuning
from femto_sft.section import SFTSection

DECREASING = ("ffd", "bfd")
lengths_and_capacity = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


def quadratic_first_fit(lengths: Sequence[int], capacity: int) -> Rows:
    """First-fit and best-fit decreasing by their definition, without data structures."""
    rows: Rows = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[item] <= capacity:
                row.append(item)
                break
        else:
            rows.append([item])
    return rows


def fewest_rows(lengths: Sequence[int], capacity: int) -> int:
    """The fewest rows, by trying every packing; of equally empty rows only one is tried."""
    best = len(lengths)

    def place(number: int, left: tuple[int, ...]) -> None:
        nonlocal best
        if len(left) >= best:
            return
        if number == len(lengths):
            best = len(left)
            return
        length = ordered[number]
        for room in set(left):
            if room >= length:
                at = left.index(room)
                place(number + 1, (*left[:at], room - length, *left[at + 1 :]))
        place(number + 1, (*left, capacity - length))

    ordered = sorted(lengths, reverse=True)
    place(0, ())
    return best


@pytest.mark.parametrize("packing", PACKINGS)
@given(lengths_and_capacity)
def test_every_item_is_in_one_row_and_no_row_is_overfull(packing: str, case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    rows = PACKINGS[packing](lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[item] for item in row) <= capacity for row in rows)
    assert rows == PACKINGS[packing](lengths, capacity)


@given(lengths_and_capacity)
def test_first_fit_decreasing_is_what_its_definition_says(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    assert first_fit_decreasing(lengths, capacity) == quadratic_first_fit(lengths, capacity)


@given(lengths_and_capacity)
def test_best_fit_opens_a_row_only_where_no_other_has_room(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    rows = [sorted(lengths[i] for i in row) for row in best_fit_decreasing(lengths, capacity)]
    for later in range(len(rows)):  # its largest item fitted into no earlier row at that time
        largest = rows[later][-1]
        for row in rows[:later]:
            assert sum(length for length in row if length >= largest) + largest > capacity


@pytest.mark.parametrize("packing", DECREASING)
@settings(deadline=None)
@given(
    st.integers(3, 30).flatmap(
        lambda capacity: st.tuples(st.lists(st.integers(1, capacity), min_size=1, max_size=9), st.just(capacity))
    )
)
def test_never_more_than_eleven_ninths_of_the_fewest_rows_and_one(packing: str, case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    assert len(PACKINGS[packing](lengths, capacity)) <= 11 / 9 * fewest_rows(lengths, capacity) + 1


@pytest.mark.parametrize("packing", DECREASING)
@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(2, 300), st.integers(1, 8))
def test_rows_cut_into_pieces_are_put_together_within_eleven_ninths(
    packing: str, seed: int, rows: int, capacity: int, most: int
) -> None:
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    for _ in range(rows):  # full rows, so `rows` is the minimum
        cuts = np.unique(random.integers(1, capacity, size=random.integers(0, most)))
        lengths += np.diff([0, *cuts.tolist(), capacity]).tolist()
    random.shuffle(lengths)
    assert rows <= len(PACKINGS[packing](lengths, capacity)) <= 11 / 9 * rows + 1


def test_the_case_in_which_first_fit_needs_eleven_rows_for_nine() -> None:
    # Johnson 1973: thirty rows' worth of 1/2 + e, 1/4 + 2e, 1/4 + e and 1/4 - 2e.
    capacity, e = 100, 1
    lengths = [51] * 6 + [25 + 2 * e] * 6 + [25 + e] * 6 + [25 - 2 * e] * 12
    assert sum(lengths) == 9 * capacity
    assert len(first_fit_decreasing(lengths, capacity)) == 11


@pytest.mark.parametrize("packing", PACKINGS)
def test_nothing_packs_into_nothing(packing: str) -> None:
    assert PACKINGS[packing]([], 8) == []


@pytest.mark.parametrize("packing", DECREASING)
@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_what_cannot_be_packed_is_a_defect(packing: str, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="do not lie between"):
        PACKINGS[packing](lengths, 8)


@pytest.mark.parametrize("packing", DECREASING)
@pytest.mark.parametrize("capacity", [512, 2048, 131072])
def test_a_hundred_thousand_conversations_take_under_a_second(packing: str, capacity: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, capacity + 1, 100_000).tolist()
    seconds = []
    for _ in range(3):  # the best of three processor times, because other processes disturb
        started = time.process_time()
        PACKINGS[packing](lengths, capacity)
        seconds.append(time.process_time() - started)
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1


def test_packing_for_a_model_that_does_not_keep_documents_apart_is_refused_and_padding_is_not() -> None:
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        models = [FullModel(make(AutoConfig.for_model(name)), Mock()) for name in ("qwen3_5_text", "llama")]
    config = {packing: config_of(packing) for packing in ("ffd", "bfd", "pad")}
    plugin = SupervisedFineTuning()
    for packing in ("ffd", "bfd"):
        with pytest.raises(UserError, match=rf"sft\.packing = '{packing}' .*Qwen3_5ForCausalLM lets a .*packing pad"):
            plugin.femto_transform_model(models[0], config[packing])
        plugin.femto_transform_model(models[1], config[packing])
    plugin.femto_transform_model(models[0], config["pad"])


def config_of(packing: str) -> Config:
    return make_config(config_class({"sft": SFTSection}), {"sft": {"packing": packing}}, {}, "")
