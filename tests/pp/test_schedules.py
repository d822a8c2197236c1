"""Simulated schedules: complete, free of deadlocks, with the papers' bubbles and memory; broken ones are refused."""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_pp import simulate as simulation
from femto_pp.actions import Action, Backward, Compute, Forward, Recv, Send, WeightBackward
from femto_pp.lowering import lower
from femto_pp.placement import Placement, round_robin
from femto_pp.schedules import SCHEDULES, Order, schedule
from femto_pp.simulate import BrokenScheduleError, play, simulate
from tests.pp.tasks import NAMES

SIZES = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 32)
CHUNKS = st.integers(1, 4)
quick = settings(max_examples=40, deadline=None)


def placement_for(name: str, size: int, chunks: int) -> Placement:
    found = SCHEDULES[name]
    return found.placement(size, min(max(chunks, found.least_chunks), found.most_chunks))


def replay(rows: Sequence[Sequence[Action]], placement: Placement) -> tuple[str, Counter[tuple[int, str]]]:
    """Run all ranks' actions by an independent model of their meaning; return what goes wrong, and what was done.

    Messages wait in the order in which they were sent. A receive takes the first of them, whichever it is.
    """
    ranks = {stage: rank for rank, row in enumerate(placement.table) for stage in row}
    waiting = [deque(row) for row in rows]
    wires: dict[tuple[int, int, str], deque[tuple[int, int]]] = {}
    there: set[tuple[str, int, int]] = set()  # (what, micro-batch, virtual stage)
    done: Counter[tuple[int, str]] = Counter()

    def wire(source: int, target: int, kind: str) -> deque[tuple[int, int]]:
        return wires.setdefault((ranks[source], ranks[target], kind), deque())

    def has(what: str, m: int, stage: int, at: int) -> bool:
        """Tell whether rank `at` has the result of a virtual stage, its own or received."""
        return (what if ranks[stage] == at else f"received {what}", m, stage) in there

    def go(rank: int, action: Action) -> str:
        """Run one action; return `wait`, an error, or an empty string."""
        compute = action if isinstance(action, Compute) else action.compute
        kind, m, stage = compute.symbol, compute.micro_batch, placement.table[rank][compute.chunk]
        before = stage - 1 if kind == "F" else stage + 1
        if isinstance(action, Recv):
            arriving = wire(before, stage, kind)
            if not arriving:
                return "wait"
            if (found := arriving.popleft()) != (m, before):
                return f"rank {rank} wants {(m, before)} and gets {found}"
            there.add((f"received {kind}", m, before))
        elif isinstance(action, Send):
            if (kind, m, stage) not in there:
                return f"rank {rank} has not computed what it sends: {action}"
            wire(stage, stage + 1 if kind == "F" else stage - 1, kind).append((m, stage))
        elif kind == "W":
            if ("B", m, stage) not in there:
                return f"rank {rank} does {action} too early"
            there.add(("W", m, stage))
        else:
            if kind == "B" and ("F", m, stage) not in there:
                return "wait"
            if before in ranks and not has(kind, m, before, rank):
                return "wait"
            there.add((kind, m, stage))
        done[rank, str(action)] += 1
        return ""

    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(waiting):
            while queue:
                said = go(rank, queue[0])
                if said == "wait":
                    break
                if said:
                    return said, done
                queue.popleft()
                progress = True
    stuck = [f"rank {rank} at {queue[0]}" for rank, queue in enumerate(waiting) if queue]
    left = [key for key, messages in wires.items() if messages]
    return "; ".join([*stuck, *(f"left over on {key}" for key in left)]), done


def lowered(orders: Sequence[Order], placement: Placement) -> list[list[Action]]:
    return [lower(orders, placement, rank) for rank in range(placement.size)]


# Properties of all schedules.


@pytest.mark.parametrize("name", NAMES)
@given(size=SIZES, micro_batches=MICRO_BATCHES, chunks=CHUNKS)
@quick
def test_everything_is_done_once_and_every_message_arrives(
    name: str, size: int, micro_batches: int, chunks: int
) -> None:
    placement = placement_for(name, size, chunks)
    orders = SCHEDULES[name].orders(micro_batches, placement)
    assert len(orders) == size
    said, done = replay(lowered(orders, placement), placement)
    assert said == ""
    kinds = "FBW" if SCHEDULES[name].splits_backward else "FB"
    numbers = [f"{m}" + (f".{c}" if c else "") for m in range(micro_batches) for c in range(placement.chunks)]
    computed = {key: count for key, count in done.items() if key[1][0] in "FBW"}
    assert computed == {(rank, kind + number): 1 for rank in range(size) for kind in kinds for number in numbers}
    assert set(done.values()) == {1}
    links = 0 if size == 1 else (placement.virtual_stages - 1) * micro_batches
    sent, received = (
        sum(count for (_, text), count in done.items() if text.startswith(letter)) for letter in ("S", "R")
    )
    assert sent == received == 2 * links
    played = simulate(orders, placement, micro_batches)
    assert len(played.timeline) == len(computed)
    assert play(name, micro_batches, placement) == played


@pytest.mark.parametrize("name", NAMES)
@given(size=SIZES, micro_batches=MICRO_BATCHES, chunks=CHUNKS)
@quick
def test_a_schedule_is_a_pure_function(name: str, size: int, micro_batches: int, chunks: int) -> None:
    placement = placement_for(name, size, chunks)
    first = SCHEDULES[name].orders(micro_batches, placement)
    assert first == SCHEDULES[name].orders(micro_batches, round_robin(placement.size, placement.chunks))
    assert all(isinstance(order, tuple) for order in first)


@pytest.mark.parametrize("name", NAMES)
@given(size=SIZES, micro_batches=MICRO_BATCHES, chunks=CHUNKS)
@quick
def test_the_timeline_is_one_that_could_happen(name: str, size: int, micro_batches: int, chunks: int) -> None:
    """A rank does one computation at a time, after all that it needs; the rest of its time is the bubble."""
    placement = placement_for(name, size, chunks)
    played = play(name, micro_batches, placement)
    ended = {
        (p.compute.symbol, p.compute.micro_batch, placement.virtual_stage(p.rank, p.compute.chunk)): p.end
        for p in played.timeline
    }
    for p in played.timeline:
        m, stage = p.compute.micro_batch, placement.virtual_stage(p.rank, p.compute.chunk)
        needs = {
            "F": [("F", m, stage - 1)],
            "B": [("F", m, stage), ("B", m, stage + 1)],
            "W": [("B", m, stage)],
        }[p.compute.symbol]
        assert all(ended[need] <= p.start for need in needs if 0 <= need[2] < placement.virtual_stages)
    for rank in range(size):
        mine = [p for p in played.timeline if p.rank == rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(mine))
    work = 3 * micro_batches * placement.chunks
    assert played.bubble == pytest.approx(1 - work / played.length)


# Promises of each schedule.


@given(size=SIZES, micro_batches=MICRO_BATCHES)
@quick
def test_gpipe_goes_back_in_reverse(size: int, micro_batches: int) -> None:
    for order in SCHEDULES["gpipe"].orders(micro_batches, round_robin(size)):
        assert [a.micro_batch for a in order] == [*range(micro_batches), *reversed(range(micro_batches))]
        assert [a.symbol for a in order] == ["F"] * micro_batches + ["B"] * micro_batches
    played = play("gpipe", micro_batches, round_robin(size))
    assert {played.in_flight(rank) for rank in range(size)} == {micro_batches}


@given(size=SIZES, micro_batches=MICRO_BATCHES)
@quick
def test_1f1b_holds_no_more_than_the_ranks_that_follow_and_has_the_paper_s_bubble(
    size: int, micro_batches: int
) -> None:
    played = play("1f1b", micro_batches, round_robin(size))
    for rank in range(size):
        assert played.in_flight(rank) == min(size - rank, micro_batches)
    assert played.bubble == pytest.approx((size - 1) / (micro_batches + size - 1))


@given(size=SIZES, micro_batches=MICRO_BATCHES)
@quick
def test_1f1b_is_warm_up_then_pairs_then_cool_down(size: int, micro_batches: int) -> None:
    for rank, order in enumerate(SCHEDULES["1f1b"].orders(micro_batches, round_robin(size))):
        ahead = min(size - rank, micro_batches)
        steady = micro_batches - ahead
        assert "".join(a.symbol for a in order) == "F" * ahead + "BF" * steady + "B" * ahead
        for kind in (Forward, Backward):
            assert [a.micro_batch for a in order if isinstance(a, kind)] == list(range(micro_batches))


@given(size=SIZES, micro_batches=MICRO_BATCHES)
@quick
def test_zb_fills_the_bubble_in_1f1b_s_memory(size: int, micro_batches: int) -> None:
    placement = round_robin(size)
    zb, other = play("zb", micro_batches, placement), play("1f1b", micro_batches, placement)
    for rank in range(size):
        assert zb.in_flight(rank) <= other.in_flight(0)
    assert zb.length <= other.length
    if size > 1:
        assert zb.bubble < other.bubble
    else:
        assert zb.bubble == 0
    if micro_batches >= 2 * size:
        busy = 3 * micro_batches
        assert zb.length - busy <= (other.length - busy) / 3, "Qi et al., table 2: a third, with equal times"


@given(size=st.integers(2, 8), rounds=st.integers(1, 6), chunks=st.integers(2, 4))
@quick
def test_interleaved_divides_the_bubble_by_the_chunks(size: int, rounds: int, chunks: int) -> None:
    m = rounds * size
    played = play("interleaved", m, round_robin(size, chunks))
    assert played.bubble == pytest.approx((size - 1) / (chunks * m + size - 1))
    assert played.bubble < play("1f1b", m, round_robin(size)).bubble
    for rank in range(size):
        most = (size - rank - 1) * 2 + (chunks - 1) * size + 1
        assert played.in_flight(rank) <= min(most, m * chunks)


@given(size=st.integers(2, 8), micro_batches=MICRO_BATCHES, chunks=st.integers(2, 4))
@quick
def test_interleaved_holds_what_it_says_for_any_number_of_micro_batches(
    size: int, micro_batches: int, chunks: int
) -> None:
    played = play("interleaved", micro_batches, round_robin(size, chunks))
    for rank in range(size):
        assert played.in_flight(rank) <= (size - rank - 1) * 2 + (chunks - 1) * size + 1


def test_pp8_with_one_micro_batch() -> None:
    for name in NAMES:
        placement = placement_for(name, 8, 2)
        assert [play(name, 1, placement).in_flight(rank) for rank in range(8)] == [placement.chunks] * 8


# Printable forms, and lowering.


def test_actions_print_in_short() -> None:
    shown = [Forward(3), Backward(0), WeightBackward(12), Forward(3, 1), Recv(Forward(3)), Send(Backward(1, 1))]
    assert list(map(str, shown)) == ["F3", "B0", "W12", "F3.1", "RF3", "SB1.1"]


def test_1f1b_in_print() -> None:
    placement = round_robin(4)
    orders = SCHEDULES["1f1b"].orders(6, placement)
    assert " ".join(map(str, orders[0])) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert " ".join(map(str, orders[3])) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    first, second = (" ".join(map(str, lower(orders, placement, rank))) for rank in (0, 1))
    assert first == "F0 SF0 F1 SF1 F2 SF2 F3 SF3 RB0 B0 F4 SF4 RB1 B1 F5 SF5 RB2 B2 RB3 B3 RB4 B4 RB5 B5"
    assert second == (
        "RF0 F0 SF0 RF1 F1 SF1 RF2 F2 SF2 RB0 B0 SB0 RF3 F3 SF3 RB1 B1 SB1 RF4 F4 SF4 RB2 B2 SB2 RF5 F5 SF5 RB3 "
        "B3 SB3 RB4 B4 SB4 RB5 B5 SB5"
    )


@pytest.mark.parametrize("name", NAMES)
@given(size=SIZES, micro_batches=MICRO_BATCHES, chunks=CHUNKS)
@quick
def test_printed_forms_are_all_different(name: str, size: int, micro_batches: int, chunks: int) -> None:
    placement = placement_for(name, size, chunks)
    for row in lowered(SCHEDULES[name].orders(micro_batches, placement), placement):
        printed = list(map(str, row))
        assert all(re.fullmatch(r"(F|B|W|RF|SF|RB|SB)\d+(\.\d+)?", text) for text in printed)
        assert len(set(printed)) == len(printed)


# Broken schedules.


def broken(size: int = 3, m: int = 4) -> list[list[Compute]]:
    return [list(order) for order in SCHEDULES["zb"].orders(m, round_robin(size))]


def verdict(orders: Sequence[Sequence[Compute]], m: int = 4, chunks: int = 1) -> str:
    try:
        simulate([tuple(order) for order in orders], round_robin(len(orders), chunks), m)
    except BrokenScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [Forward, Backward, WeightBackward])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_action_left_out_is_named(kind: type[Compute], rank: int) -> None:
    orders = broken()
    orders[rank].remove(kind(2))
    assert verdict(orders) == f"rank {rank} leaves out {kind(2)}"


def test_an_action_done_twice_is_named() -> None:
    orders = broken()
    orders[1].append(Backward(3))
    assert verdict(orders) == "rank 1 does B3 twice"


def test_an_action_that_does_not_exist_is_named() -> None:
    orders = broken()
    orders[2].append(Forward(4))
    assert verdict(orders) == "rank 2 invents F4"
    orders = broken()
    orders[0].append(Forward(0, 1))
    assert verdict(orders) == "rank 0 invents F0.1"


def test_weight_gradients_before_their_backward_are_caught() -> None:
    orders = broken()
    b, w = orders[1].index(Backward(0)), orders[1].index(WeightBackward(0))
    orders[1][b], orders[1][w] = WeightBackward(0), Backward(0)
    assert "wait for each other forever" in verdict(orders)
    assert "rank 1 at W0" in verdict(orders)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    eager = (Forward(0), Backward(0), Forward(1), Backward(1))
    lazy = (Forward(0), Forward(1), Backward(0), Backward(1))
    assert verdict([lazy, eager], 2) == ""
    assert verdict([eager, lazy], 2) == "ranks wait for each other forever: rank 0 at B0, rank 1 at F1"


def test_messages_received_in_another_order_than_sent_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lower` never does so, hence it is replaced here."""

    def careless(orders: Sequence[Order], placement: Placement, rank: int) -> list[Action]:
        actions = lower(orders, placement, rank)
        if rank == 1:
            first, second = (actions.index(Recv(Forward(m))) for m in (0, 1))
            actions[first], actions[second] = actions[second], actions[first]
        return actions

    orders = SCHEDULES["gpipe"].orders(3, round_robin(2))
    assert simulate(orders, round_robin(2), 3)
    monkeypatch.setattr(simulation, "lower", careless)
    with pytest.raises(BrokenScheduleError, match="messages from rank 0 to rank 1 are not received as sent"):
        simulate(orders, round_robin(2), 3)


@given(data=st.data(), name=st.sampled_from(NAMES), size=st.integers(1, 4), m=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_the_simulator_and_an_independent_model_agree_on_shuffled_schedules(
    data: st.DataObject, name: str, size: int, m: int
) -> None:
    """Complete orders in which two computations of a rank are exchanged, up to three times: some hang, some do not."""
    placement = placement_for(name, size, 2)
    orders = [list(order) for order in SCHEDULES[name].orders(m, placement)]
    for _ in range(data.draw(st.integers(1, 3))):
        order = data.draw(st.sampled_from(orders))
        i, j = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
        order[i], order[j] = order[j], order[i]
    said, _ = replay(lowered([tuple(order) for order in orders], placement), placement)
    assert bool(verdict(orders, m, placement.chunks)) == bool(said), said


# The registry.


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="schedule '1f1b' is registered already"):
        schedule("1f1b")(SCHEDULES["1f1b"].orders)
    assert set(SCHEDULES) == set(NAMES)
