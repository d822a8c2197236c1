"""Placements by table; pipelines with a V-shaped placement train as one process does, in float64 at 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_core.errors import UserError
from femto_pp.actions import Backward, Forward, WeightBackward
from femto_pp.lowering import channels, consumer, lower, producer
from femto_pp.placement import Placement, round_robin
from femto_pp.schedules import SCHEDULES, list_schedule, schedule
from femto_pp.section import PPSection, placement_of
from femto_pp.simulate import needed, simulate
from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, make_trainer, worst_difference
from tests.pp.tasks import (
    BASE,
    BOUND,
    THIRD_PARTY,
    ZERO,
    Values,
    merged,
    pipeline,
    train_third_party,
    v_schedule,
    v_shaped,
    v_split,
)
from tests.pp.test_schedules import lowered, replay

OneProcess = Callable[[Values, RandomTask], Record]
quick = settings(max_examples=60, deadline=None)


@given(size=st.integers(1, 8), chunks=st.integers(1, 4))
@quick
def test_round_robin_deals_virtual_stages_out_rank_by_rank(size: int, chunks: int) -> None:
    placement = round_robin(size, chunks)
    assert (placement.size, placement.chunks, placement.virtual_stages) == (size, chunks, size * chunks)
    for stage in range(size * chunks):
        assert (placement.rank(stage), placement.chunk(stage)) == (stage % size, stage // size)
        assert placement.virtual_stage(stage % size, stage // size) == stage


def test_v_in_print() -> None:
    """Rank 0 holds virtual stages 0 and 3; rank 1 hands the result of 1 to 2 without a message."""
    placement = v_shaped(2, 2)
    assert placement.table == ((0, 3), (1, 2))
    assert channels(placement) == [(0, 1, "F"), (1, 0, "B"), (1, 0, "F"), (0, 1, "B")]
    first, second = (" ".join(map(str, row)) for row in lowered(v_schedule(1, placement), placement))
    assert first == "F0 SF0 RF0.1 F0.1 B0.1 SB0.1 RB0 B0"
    assert second == "RF0 F0 F0.1 SF0.1 RB0.1 B0.1 B0 SB0"


def test_the_data_flow_follows_the_table_in_both_directions() -> None:
    placement = v_shaped(2, 2)
    assert producer(Forward(5), placement, 0) is None
    assert producer(Forward(5, 1), placement, 0) == (1, Forward(5, 1))
    assert producer(Forward(5, 1), placement, 1) == (1, Forward(5, 0))
    assert consumer(Forward(5, 1), placement, 0) is None
    assert producer(Backward(5, 1), placement, 0) is None
    assert consumer(Backward(5, 1), placement, 0) == (1, Backward(5, 1))
    assert consumer(Backward(5, 0), placement, 1) == (0, Backward(5, 0))
    assert consumer(WeightBackward(5), placement, 1) is producer(WeightBackward(5), placement, 1) is None
    assert needed(Backward(5, 0), placement, 0) == [(0, Forward(5)), (1, Backward(5))]
    assert needed(Backward(5, 1), placement, 0) == [(0, Forward(5, 1))]
    assert needed(WeightBackward(5, 1), placement, 1) == [(1, Backward(5, 1))]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any table of up to five ranks and three chunks."""
    size, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stages = draw(st.permutations(range(size * chunks)))
    return Placement(tuple(tuple(sorted(stages[rank::size])) for rank in range(size)))


@given(placement=placements(), m=st.integers(1, 9), limit=st.integers(1, 12), held=st.integers(0, 12))
@quick
def test_the_list_scheduler_ends_on_any_placement(placement: Placement, m: int, limit: int, held: int) -> None:
    orders = list_schedule(m, placement, lambda _: limit, held=held)
    assert len(simulate(orders, placement, m, splits=held > 0).timeline) == (3 if held else 2) * m * (
        placement.virtual_stages
    )
    said, done = replay(lowered(orders, placement), placement)
    assert said == ""
    assert set(done.values()) == {1}


@given(size=st.integers(1, 6), chunks=st.integers(2, 4), m=st.integers(1, 12), splits=st.booleans())
@quick
def test_v_shaped_pipelines_lose_no_message(size: int, chunks: int, m: int, splits: bool) -> None:
    placement = v_shaped(size, chunks)
    orders = (v_split if splits else v_schedule)(m, placement)
    said, done = replay(lowered(orders, placement), placement)
    assert said == ""
    turns = chunks - 1  # two neighbouring virtual stages on one rank
    sent = sum(count for (_, text), count in done.items() if text[0] == "S")
    assert sent == 2 * m * (0 if size == 1 else placement.virtual_stages - 1 - turns)
    assert [rank for rank in range(size) for a in lower(orders, placement, rank) if str(a) == "F0"] == [*range(size)]


@pytest.mark.parametrize(
    "table",
    [(), ((),), ((0, 1), (3, 4)), ((0, 1), (1, 2)), ((0,), (1, 2)), ((0, 1), (2,), (3, 4, 5)), ((1, 2), (3, 4))],
    ids=str,
)
def test_a_table_that_misses_or_repeats_a_virtual_stage_is_refused(table: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="must hold each virtual stage from 0 on once"):
        Placement(table)


def test_a_rank_s_virtual_stages_ascend() -> None:
    with pytest.raises(ValueError, match="must be in ascending order"):
        Placement(((3, 0), (1, 2)))


@pytest.fixture
def registered() -> Iterator[None]:
    for name in ("v", "v split"):
        function, options = THIRD_PARTY[name]
        schedule(name, **options)(function)
    schedule("wrong size", placement=lambda size, chunks: round_robin(size + 1, chunks))(v_schedule)
    yield
    for name in ("v", "v split", "wrong size"):
        del SCHEDULES[name]


@pytest.mark.usefixtures("registered")
def test_the_settings_choose_the_schedule_s_placement() -> None:
    assert placement_of(PPSection(size=2, schedule="v")) == Placement(((0, 3), (1, 2)))
    assert placement_of(PPSection(size=2, schedule="interleaved")) == Placement(((0, 2), (1, 3)))
    with pytest.raises(UserError, match=r"pp.chunks = 5: schedule v takes 2 to 4 for each rank"):
        placement_of(PPSection(size=2, schedule="v", chunks=5))
    with pytest.raises(ValueError, match="places 1 chunks on each of 3 ranks instead of 1 on each of 2"):
        placement_of(PPSection(size=2, schedule="wrong size"))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("name", "world", "size", "chunks", "zero"),
    [
        ("v", 2, 2, 2, ""),
        ("v split", 2, 2, 2, ""),
        ("v", 2, 2, 3, ""),
        ("v", 4, 4, 2, ""),
        ("v", 4, 2, 2, "zero2"),
        ("v split", 4, 2, 2, "zero3"),
    ],
)
def test_a_v_shaped_pipeline_trains_as_one_process(
    pool: WorkerPool, one_process: OneProcess, name: str, world: int, size: int, chunks: int, zero: str, tied: bool
) -> None:
    """With two chunks rank 0 holds embedding and head, so that a tied weight exists once."""
    model = merged(BASE, {"model": {"tied": tied, "layers": 9}})
    one = one_process(merged(model, {"data": {"micro_batch": 8}}), RandomTask())
    values = merged(model, pipeline(name, size, chunks=chunks), ZERO[zero])
    plugins = ("pp", zero) if zero else ("pp",)
    parts = pool.run(world, train_third_party, name, values, RandomTask(), plugins)
    assert worst_difference(one, assemble(parts)) < BOUND


def held_out_loss(values: Values, plugins: tuple[str, ...]) -> float:
    """Train one step and evaluate, as a worker's job."""
    function, options = THIRD_PARTY["v"]
    schedule("v", **options)(function)
    try:
        trainer = make_trainer(values, plugins)
        trainer.train_step()
        loss = trainer.evaluate()
        trainer.close()
    finally:
        del SCHEDULES["v"]
    return loss


def test_evaluation_on_a_v_shaped_pipeline(pool: WorkerPool) -> None:
    values = merged(BASE, {"data": {"micro_batch": 4}, "eval": {"rows": 7}})
    [one] = pool.run(1, held_out_loss, values, ())
    for size in (2, 4):
        model: Values = {"model": {"layers": 8}} if size == 4 else {}
        if model:
            [one] = pool.run(1, held_out_loss, merged(values, model), ())
        losses = pool.run(size, held_out_loss, merged(values, model, pipeline("v", size)), ("pp",))
        assert losses == pytest.approx([one] * size, rel=1e-9)
