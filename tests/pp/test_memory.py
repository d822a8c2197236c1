"""Memory follows the schedule: activations in flight, outputs freed once sent, ZeRO-3's units unsharded once."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import Any

import attrs
import pytest
import torch

from femto_core.model import Stage
from femto_ops import collectives
from femto_ops.memory import LiveBytes
from femto_pp.actions import Backward, Compute, Forward
from femto_pp.pipeline import Run
from femto_pp.placement import round_robin
from femto_pp.simulate import play
from femto_tools.testing import WorkerPool, make_trainer
from femto_zero.sharded import ShardedWeights
from femto_zero.units import Unit
from tests.pp.tasks import NAMES, Values, merged, pipeline, pipeline_of

pytestmark = pytest.mark.slow

WIDE: Values = {
    "train": {"steps": 4, "dtype": "float32"},
    "model": {"layers": 4, "hidden_size": 32, "intermediate_size": 64},
    "data": {"seq_len": 32, "micro_batch": 1},
}


@attrs.frozen
class Measured:
    """Live bytes of one step, in excess of those before it."""

    peak: int
    after: int
    """At the end of the step."""
    forwards: dict[str, int]
    """Chunk -> the bytes that its last forward left alive."""
    halves: dict[str, int]
    """Chunk -> the live bytes after its last `Backward`."""
    outputs: int
    """The most earlier outputs of this rank that were alive when a forward began."""


def measure(values: Values, plugins: tuple[str, ...] = ()) -> Measured:
    """Count live bytes in the second step's micro-batches."""
    with LiveBytes(torch.device("cpu")) as counter:
        trainer = make_trainer(values, ("pp", *plugins))
        executor = pipeline_of(trainer)
        compute, forward = executor._compute, trainer.stage.forward
        forwards: dict[str, int] = {}
        halves: dict[str, int] = {}
        made: list[weakref.ref[Any]] = []
        outputs = 0

        def counted(stage: Stage, run: Run, action: Compute) -> None:
            before = counter.live()
            compute(stage, run, action)
            if isinstance(action, Forward):
                forwards[str(action.chunk)] = counter.live() - before
                if len(run.batches) == 1 and action.chunk == len(stage.chunks) - 1:
                    executor._links.drain()
            elif isinstance(action, Backward):
                halves[str(action.chunk)] = counter.live()

        def noted(*arguments: Any) -> torch.Tensor:
            nonlocal outputs
            outputs = max(outputs, sum(ref() is not None for ref in made))
            hidden = forward(*arguments)
            made.append(weakref.ref(hidden.untyped_storage()))
            return hidden

        trainer.train_step()
        executor._compute, trainer.stage.forward = counted, noted  # type: ignore[method-assign, assignment]
        micro_batches = trainer.loader.next_step()
        scale = torch.ones((), dtype=torch.float64)
        base = counter.live()
        counter.take_peak()
        executor.run(trainer.stage, micro_batches, trainer.loss, scale, trainer.sharding)
        peak = counter.take_peak() - base
        trainer.sharding.finish_gradients()
        trainer.precision.zero_grad(trainer.shares)
        trainer.sharding.post_step()
        after = counter.live() - base
        trainer.close()
        return Measured(peak, after, forwards, {key: value - base for key, value in halves.items()}, outputs)


def micro_batches(count: int) -> Values:
    return {"data": {"global_batch": count}}


@pytest.fixture(scope="module")
def measured(pool: WorkerPool) -> dict[tuple[str, int], list[Measured]]:
    """(schedule, number of micro-batches) -> the measurements of two ranks."""
    return {
        (name, m): pool.run(2, measure, merged(WIDE, pipeline(name), micro_batches(m)))
        for name in NAMES
        for m in ((1, 2, 6) if name in ("gpipe", "1f1b") else (1, 6))
    }


@pytest.mark.parametrize("name", NAMES)
def test_live_bytes_follow_the_simulator_s_figure(measured: dict[tuple[str, int], list[Measured]], name: str) -> None:
    """The peak is the simulator's number of forwards in flight, plus the working memory of one forward and backward."""
    chunks = 2 if name == "interleaved" else 1
    for rank in range(2):
        one, many = measured[name, 1][rank], measured[name, 6][rank]
        activations = max(one.forwards.values())
        in_flight = play(name, 6, round_robin(2, chunks)).in_flight(rank)
        alone = play(name, 1, round_robin(2, chunks)).in_flight(rank)
        assert many.peak <= one.peak + (in_flight - alone) * activations + 0.5 * activations, (rank, one, many)
        least = min(one.forwards.values())
        assert many.peak >= one.peak + (in_flight - alone - 1.5) * least, "else the upper bound would prove nothing"


def test_1f1b_needs_no_more_for_more_micro_batches_and_gpipe_does(
    measured: dict[tuple[str, int], list[Measured]],
) -> None:
    for rank in range(2):
        assert measured["1f1b", 6][rank].peak <= 1.1 * measured["1f1b", 2][rank].peak
        assert measured["gpipe", 6][rank].peak > 1.8 * measured["gpipe", 2][rank].peak
        assert measured["1f1b", 6][rank].peak < 0.6 * measured["gpipe", 6][rank].peak


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_after_a_step(measured: dict[tuple[str, int], list[Measured]], name: str) -> None:
    for m in (1, 6):
        for rank in range(2):
            assert abs(measured[name, m][rank].after) < 4096, "the bytes of one micro-batch's hidden states"


@pytest.mark.parametrize("name", NAMES)
def test_between_the_halves_of_a_backward_only_its_linear_layers_inputs_and_gradients_are_kept(
    measured: dict[tuple[str, int], list[Measured]], name: str
) -> None:
    """A backward that is not split leaves only weight gradients."""
    weights = 4 * (2 * (32 * (32 + 32) + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32 * 32 + 32)
    for rank in range(2):
        one = measured[name, 1][rank]
        left = one.halves["0"]
        if name == "zb":
            tokens, linears = 32, 4 * 32 + 2 * 16 + 2 * 64 + 32 + (32 + 64)
            assert left <= weights + 4 * 2 * tokens * (linears + 3 * 32 + 64)
        else:
            assert left <= weights + 4 * 32 * 32 * 2


def sent_outputs(values: Values) -> tuple[int, int]:
    """Return how many outputs rank 0 made, and how many are alive after all forwards are done and all outputs sent."""
    trainer = make_trainer(values, ("pp",))
    executor = pipeline_of(trainer)
    forward, compute = trainer.stage.forward, executor._compute
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def noted(*arguments: Any) -> torch.Tensor:
        hidden = forward(*arguments)
        made.append(weakref.ref(hidden.untyped_storage()))
        return hidden

    def watched(stage: Stage, run: Run, action: Compute) -> None:
        if isinstance(action, Backward) and not alive and trainer.mesh.rank == 0:
            executor._links.drain()
            deadline = time.monotonic() + 5  # the waiting thread may still hold the last output
            while any(ref() is not None for ref in made) and time.monotonic() < deadline:
                time.sleep(0.01)
            alive.append(sum(ref() is not None for ref in made))
        compute(stage, run, action)

    trainer.stage.forward, executor._compute = noted, watched  # type: ignore[method-assign, assignment]
    trainer.train_step()
    trainer.close()
    return len(made), alive[0] if alive else 0


def test_outputs_are_gone_once_they_are_sent_though_their_backward_is_yet_to_come(pool: WorkerPool) -> None:
    made, alive = pool.run(2, sent_outputs, merged(WIDE, pipeline("gpipe"), micro_batches(8)))[0]
    assert (made, alive) == (8, 0)


# ZeRO.


@attrs.frozen
class Gathers:
    """The work of ZeRO-3 in one step, on one rank."""

    gathers: dict[str, int]
    """Unit -> its all-gathers."""
    most_whole: int
    """The most units that were unsharded at a time."""
    whole_bytes: list[int]
    """The sizes of unsharded vectors' storages, in bytes beyond the vectors' own."""
    reduced: int
    """The number of reduce-scatters."""
    peak: int
    """Peak live bytes, in excess of those before the step."""
    units: int


def count_gathers(values: Values) -> Gathers:
    with LiveBytes(torch.device("cpu")) as counter:
        trainer = make_trainer(values, ("pp", "zero3", *(["tp"] if "tp" in values else [])))
        assert isinstance(trainer.sharding, ShardedWeights)
        units = trainer.sharding._units
        trainer.train_step()
        found: Counter[str] = Counter()
        most = 0
        sizes: set[int] = set()
        reduced = 0
        start, reduce = Unit.start_gather, collectives.reduce_scatter

        def counted(unit: Unit) -> None:
            nonlocal most
            found[unit.name] += not unit.gathered
            start(unit)
            most = max(most, sum(u.gathered for u in units))
            sizes.update(
                flat.whole.untyped_storage().nbytes() - flat.nbytes for u in units if u.gathered for flat in u.flats
            )

        def noted(*arguments: Any) -> Any:
            nonlocal reduced
            reduced += 1
            return reduce(*arguments)

        base = counter.live()
        counter.take_peak()
        try:
            Unit.start_gather, collectives.reduce_scatter = counted, noted  # type: ignore[method-assign, assignment]
            trainer.train_step()
        finally:
            Unit.start_gather, collectives.reduce_scatter = start, reduce  # type: ignore[method-assign]
        peak = counter.take_peak() - base
        result = Gathers(dict(found), most, sorted(sizes), reduced, peak, len(units))
        trainer.close()
        return result


M = 4


def gathers_of(pool: WorkerPool, name: str, m: int = M) -> list[Gathers]:
    values = merged(WIDE, pipeline(name), micro_batches(2 * m), {"model": {"tied": False}})
    return pool.run(4, count_gathers, values)


@pytest.fixture(scope="module")
def gathered(pool: WorkerPool) -> dict[str, list[Gathers]]:
    """Schedule -> the counts of one pipeline's ranks, for two pipelines of two ranks each."""
    return {name: gathers_of(pool, name)[::2] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_stage_3_gathers_as_often_as_the_readme_says(gathered: dict[str, list[Gathers]], name: str) -> None:
    """Two gathers per micro-batch; one for the embedding and for a rank's last unit, which stays until its backward."""
    for rank, seen in enumerate(gathered[name]):
        names = list(seen.gathers)
        assert len(names) == seen.units
        for unit, count in seen.gathers.items():
            wanted = M if unit == "before" or unit == names[-1] else 2 * M
            assert count == wanted, (rank, seen.gathers)


def test_an_embedding_that_is_cut_by_its_vocabulary_is_gathered_once_too(pool: WorkerPool) -> None:
    values = merged(WIDE, micro_batches(2 * M), {"model": {"tied": False}, "tp": {"size": 2}, "pp": {"size": 1}})
    for seen in pool.run(4, count_gathers, values):
        assert seen.gathers["before"] == M


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_of_stage_3_is_whole_once_at_most(gathered: dict[str, list[Gathers]], name: str) -> None:
    for seen in gathered[name]:
        assert seen.whole_bytes == [0], "an unsharded vector exists once"
        assert seen.most_whole <= 3, "the unit that computes, the prefetched one, and the last one, which stays"


@pytest.mark.parametrize("name", ["1f1b", "zb"])
def test_stage_3_needs_no_more_for_more_micro_batches(
    pool: WorkerPool, gathered: dict[str, list[Gathers]], name: str
) -> None:
    for few, many in zip(gathered[name], gathers_of(pool, name, 12)[::2], strict=True):
        assert many.peak <= 1.05 * few.peak
        assert many.most_whole == few.most_whole


@pytest.mark.parametrize("name", NAMES)
def test_how_often_stage_3_reduces(gathered: dict[str, list[Gathers]], name: str) -> None:
    """Once per unit and micro-batch; a rank with several chunks reduces all of them after each chunk (README)."""
    for seen in gathered[name]:
        chunks = 2 if name == "interleaved" else 1
        assert seen.reduced == chunks * M * seen.units
