"""Partitions: each layer in one chunk, no chunk empty unless asked for, a sentence for settings that are impossible."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_core import hookspecs
from femto_core.config import config_class, make_config
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.plugins import activate
from femto_pp.partition import balanced_layers, divide, even_layers, head_cost
from femto_tools.testing import WorkerPool
from tests.pp.tasks import Values, attempt, merged, pipeline

quick = settings(max_examples=60, deadline=None)


class Config:
    """The entries of a transformers config that partitions read."""

    def __init__(self, layers: int, **changes: int) -> None:
        self.num_hidden_layers = layers
        self.hidden_size, self.intermediate_size, self.vocab_size = 64, 128, 1000
        self.num_attention_heads, self.num_key_value_heads = 4, 2
        vars(self).update(changes)


def counts(layers: int, chunks: int, how: str = "even", **changes: int) -> list[int]:
    ranges = divide(Config(layers, **changes), chunks, how)
    assert [i for r in ranges for i in r] == list(range(layers)), "every layer once, in order"
    return [len(r) for r in ranges]


@pytest.mark.parametrize(
    ("layers", "chunks", "wanted"),
    [
        (30, 4, [8, 8, 7, 7]),
        (10, 3, [4, 3, 3]),
        (42, 16, [3] * 10 + [2] * 6),
        (8, 8, [1] * 8),
        (5, 1, [5]),
    ],
)
def test_even_chunks_differ_by_one_layer_at_most(layers: int, chunks: int, wanted: list[int]) -> None:
    assert counts(layers, chunks) == even_layers(layers, chunks) == wanted


@given(layers=st.integers(1, 64), chunks=st.integers(1, 16), how=st.sampled_from(["even", "balanced"]))
@quick
def test_every_layer_is_placed_and_no_chunk_is_empty_or_it_is_refused(layers: int, chunks: int, how: str) -> None:
    if chunks > layers:
        with pytest.raises(UserError, match=f"{layers} layers cannot be divided into {chunks} pipeline chunks"):
            counts(layers, chunks, how)
        return
    found = counts(layers, chunks, how)
    assert len(found) == chunks
    assert min(found) >= 1
    if how == "even":
        assert max(found) - min(found) <= 1


def slowest(found: list[int], first: float, last: float) -> float:
    extra = [0.0] * len(found)
    extra[0] += first
    extra[-1] += last
    return max(count + more for count, more in zip(found, extra, strict=True))


@given(
    layers=st.integers(1, 9),
    chunks=st.integers(1, 4),
    first=st.sampled_from([0.0, 0.5, 3.0]),
    last=st.sampled_from([0.0, 0.3, 1.0, 2.5, 20.0]),
)
@quick
def test_balanced_is_as_good_as_the_best_of_all_divisions(layers: int, chunks: int, first: float, last: float) -> None:
    if chunks > layers:
        return
    every = [c for c in itertools.product(range(1, layers + 1), repeat=chunks) if sum(c) == layers]
    best = min(slowest(list(c), first, last) for c in every)
    found = balanced_layers(layers, chunks, first, last)
    assert sum(found) == layers
    assert min(found) >= 1
    assert slowest(found, first, last) == pytest.approx(best)


def test_balanced_counts_the_head() -> None:
    """Llama-like: a head of 128000 rows costs more than two layers, so the last chunk gets fewer."""
    wide = Config(32, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
    wide.vocab_size = 128_000
    layer = 2048 * 64 * (32 + 32 + 8 + 8) + 3 * 2048 * 8192
    assert head_cost(wide) == pytest.approx(2048 * 128_000 / layer)
    found = [len(r) for r in divide(wide, 4, "balanced")]
    assert found[-1] < found[0]
    assert slowest(found, 0, head_cost(wide)) < slowest(even_layers(32, 4), 0, head_cost(wide))
    narrow = Config(32)
    narrow.vocab_size = 8
    assert [len(r) for r in divide(narrow, 4, "balanced")] == [8] * 4


def test_a_head_dim_of_its_own_is_counted() -> None:
    assert head_cost(Config(4, head_dim=64)) < head_cost(Config(4)) == head_cost(Config(4, head_dim=16))


def test_by_hand_and_empty_ends() -> None:
    assert counts(8, 3, "3,3,2") == [3, 3, 2]
    assert counts(8, 3, " 3, 4 ,1") == [3, 4, 1]
    assert counts(8, 4, "0,4,4,0") == [0, 4, 4, 0]
    assert counts(4, 2, "0,4") == [0, 4]
    assert counts(4, 2, "4,0") == [4, 0]


@pytest.mark.parametrize(
    ("layers", "chunks", "said"),
    [
        ("3,3", 3, "pp.layers = '3,3' must be 3 numbers, one for each chunk, that add up to 8 layers"),
        ("3,3,3", 3, "add up to 8 layers"),
        ("8,0,0", 3, "only the first and the last chunk may have no layers"),
        ("9,-1", 2, "cannot have a negative number of layers"),
        ("evn", 2, "pp.layers = 'evn' must be even, balanced, or numbers such as 3,3,2"),
        ("", 2, "must be even, balanced, or numbers"),
        ("4,,4", 2, "must be even, balanced, or numbers"),
        ("4.5,3.5", 2, "must be even, balanced, or numbers"),
        ("even", 9, "8 layers cannot be divided into 9 pipeline chunks"),
        ("balanced", 9, "8 layers cannot be divided into 9 pipeline chunks"),
    ],
)
def test_numbers_that_are_wrong_are_refused_in_a_sentence(layers: str, chunks: int, said: str) -> None:
    with pytest.raises(UserError) as refused:
        divide(Config(8), chunks, layers)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


# Settings, before any process group exists.


def refusal(plugins: tuple[str, ...], values: Values) -> str:
    hooks = Hooks(activate(plugins).manager)
    try:
        hooks.call(hookspecs.femto_validate, config=make_config(config_class(hooks.config_sections()), values, {}))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"schedule": "1f1n"}, ("'1f1n' is no schedule", "did you mean", "1f1b", "gpipe, 1f1b, interleaved, zb")),
        ({"schedule": "zbv9"}, ("'zbv9' is no schedule", "schedules: gpipe, 1f1b, interleaved, zb")),
        ({"schedule": "1f1b", "chunks": 2}, ("pp.chunks = 2", "schedule 1f1b takes 1")),
        ({"schedule": "zb", "chunks": 3}, ("pp.chunks = 3", "schedule zb takes 1")),
        ({"schedule": "interleaved", "chunks": 1}, ("pp.chunks = 1", "interleaved takes 2 to 64")),
        ({"chunks": -1}, ("pp.chunks", "must not be negative")),
        ({"size": 0}, ("pp.size", "must be greater than 0")),
        ({"sise": 2}, ("sise", "size")),
        ({"size": "two"}, ("pp.size",)),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(section: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refusal(("pp",), {"pp": section})
    assert "\n" not in said
    assert all(word in said for word in words), said


def test_every_schedule_is_accepted_with_its_own_number_of_chunks() -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb"):
        assert refusal(("pp",), {"pp": {"schedule": name}}) == ""
    assert refusal(("pp",), {"pp": {"schedule": "interleaved", "chunks": 4}}) == ""


def test_a_pp_section_without_its_plugin_is_refused() -> None:
    said = refusal((), {"pp": {"size": 2}})
    assert "pp" in said
    assert "plugin" in said
    assert "\n" not in said


# Settings that only the model or the number of processes proves wrong.


def test_settings_that_fit_neither_model_nor_world_are_refused_by_all_ranks_in_one_sentence(pool: WorkerPool) -> None:
    model: Values = {"model": {"layers": 4}}
    cases: list[tuple[int, Values, tuple[str, ...]]] = [
        (3, pipeline("1f1b", 2), ("3 processes cannot be laid out as pp 2", "--nproc-per-node")),
        (2, pipeline("1f1b", 4), ("2 processes cannot be laid out as pp 4",)),
        (2, merged(pipeline("1f1b"), {"model": {"layers": 1}}), ("1 layers cannot be divided into 2",)),
        (4, pipeline("interleaved", 4), ("4 layers cannot be divided into 8 pipeline chunks", "pp.layers")),
        (2, pipeline("interleaved", layers="2,2"), ("must be 4 numbers",)),
        (2, pipeline("1f1b", layers="3,2"), ("add up to 4 layers",)),
    ]
    for world, values, words in cases:
        answers = pool.run(world, attempt, merged(model, values), ("pp",), timeout_s=60)
        assert len(set(answers)) == 1, answers
        assert all(word in answers[0] for word in words), answers[0]
        assert "\n" not in answers[0]


def test_two_schedules_for_one_seat_are_refused_by_name() -> None:
    from femto_core.hookspecs import hookimpl

    class Mine:
        @hookimpl
        def femto_schedule(self) -> None:
            return None

    with pytest.raises(UserError, match=r"'pp' .* and 'mine' .* both take the seat femto_schedule"):
        activate(("pp",), objects={"mine": Mine()})
