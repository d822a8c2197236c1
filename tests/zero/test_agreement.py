"""All stages train alike: as one process in float64, and bit for bit as each other in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, worst_difference
from tests.merging import Values, merged
from tests.zero.tasks import SHARDED, train_stage

BOUND = 1e-9
FIVE: Values = {"train": {"steps": 5}}
OneProcess = Callable[[Values, RandomTask], Record]


def five_steps(tied: bool, micro_batch: int) -> Values:
    return merged(FIVE, {"model": {"tied": tied}, "data": {"micro_batch": micro_batch}})


# (plugins besides the stage's, ranks, accumulating, tied): stage 0 without any is in tests/parity.
PLAIN = [("", 1, True, True), ("", 1, False, False), ("", 4, True, False), ("", 4, False, True)]
PLAIN += [("", 2, accumulating, tied) for accumulating in (True, False) for tied in (True, False)]
MIXED = [("bf16", dp, both, both) for dp in (2, 4) for both in (True, False)]
CASES = [("stage 0", *case) for case in MIXED] + [(stage, *case) for stage in SHARDED for case in [*PLAIN, *MIXED]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("stage", "precision", "dp", "accumulating", "tied"), CASES)
def test_a_stage_trains_as_one_process(
    pool: WorkerPool, one_process: OneProcess, stage: str, precision: str, dp: int, accumulating: bool, tied: bool
) -> None:
    """Plugin bf16 keeps its masters apart in float64, too."""
    values = five_steps(tied, 1 if accumulating else 8 // dp)
    extra = (precision,) if precision else ()
    record = assemble(pool.run(dp, train_stage, stage, values, RandomTask(), extra))
    one = one_process(five_steps(tied, 8), RandomTask())
    assert len(one.gradients) == len(record.gradients) == 5
    assert worst_difference(one, record) < BOUND


@pytest.mark.one_in(3)
@pytest.mark.parametrize("every", [True, False], ids=["reduce every", "reduce once"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_stage_3_trains_alike_with_any_of_its_settings(
    pool: WorkerPool, one_process: OneProcess, prefetch: int, reshard: bool, every: bool
) -> None:
    tied = (prefetch % 2 == 0) is reshard  # each with both
    values = merged(FIVE, {"model": {"tied": tied, "layers": 3}, "data": {"micro_batch": 2}})
    section = {"prefetch": prefetch, "reshard_after_forward": reshard, "reduce_every_micro_batch": every}
    record = assemble(pool.run(2, train_stage, "stage 3", values, RandomTask(), (), {"zero": section}))
    assert worst_difference(one_process(values, RandomTask()), record) < BOUND


@pytest.mark.parametrize("bucket_mib", [1e-6, 0.01, 25.0], ids=["a bucket each", "some", "one bucket"])
@pytest.mark.parametrize("stage", ["stage 1", "stage 2"])
def test_stages_1_and_2_train_alike_with_buckets_of_any_size(
    pool: WorkerPool, one_process: OneProcess, stage: str, bucket_mib: float
) -> None:
    values = five_steps(True, 2)
    record = assemble(pool.run(2, train_stage, stage, values, RandomTask(), (), {"zero": {"bucket_mib": bucket_mib}}))
    assert worst_difference(one_process(values, RandomTask()), record) < BOUND


@pytest.mark.parametrize(
    ("stage", "family"),
    [("stage 1", "qwen2"), ("stage 2", "qwen3"), ("stage 3", "mistral"), ("stage 3", "qwen2"), ("stage 3", "qwen3")],
)
def test_every_family_trains_alike_on_three_ranks(
    pool: WorkerPool, one_process: OneProcess, stage: str, family: str
) -> None:
    """Three ranks: no size divides. Qwen2 has biases, Qwen3 norms inside attention."""
    values = merged(FIVE, {"model": {"family": family, "vocab_size": 31, "tied": False}, "data": {"global_batch": 6}})
    task = RandomTask(documents=3)
    assert worst_difference(one_process(values, task), assemble(pool.run(3, train_stage, stage, values, task))) < BOUND


@pytest.mark.parametrize("stage", SHARDED)
def test_the_same_data_for_fifty_steps_and_the_difference_does_not_grow(
    pool: WorkerPool, one_process: OneProcess, stage: str
) -> None:
    values: Values = {"train": {"steps": 50}, "data": {"shuffle": False, "micro_batch": 4}, "model": {"layers": 1}}
    one = one_process(values, RandomTask(rows=8))
    two = assemble(pool.run(2, train_stage, stage, values, RandomTask(rows=8)))
    assert one.losses[-1] < one.losses[0] - 1, "a run that learns nothing would prove nothing"
    steps = [
        max(float((mine[name] - theirs[name]).abs().max() / mine[name].abs().max()) for name in mine)
        for mine, theirs in zip(one.gradients, two.gradients, strict=True)
    ]
    assert max(steps) < 1e-11
    assert worst_difference(one, two) < BOUND


# In bf16, bit for bit.

ODD: Values = {
    "train": {"steps": 4, "dtype": "float32"},
    "model": {"hidden_size": 40, "intermediate_size": 27, "vocab_size": 33},
    "optim": {"clip": 0.0},
}
"""Sizes that no vector of a CPU divides: what fused kernels do at the end of a tensor must not depend on its cut.

Clipping is off: the norm is a sum that depends on the cut by one unit of fp32, and so would what is scaled by it.
"""


def assert_same_bits(one: Record, other: Record) -> None:
    assert one.losses == other.losses
    for norm, another in zip(one.norms, other.norms, strict=True):
        assert norm == pytest.approx(another, rel=1e-6)
    for mine, theirs in zip([*one.gradients, one.weights], [*other.gradients, other.weights], strict=True):
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not different


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dp", "reduce", "tied"),
    [
        *((2, reduce, tied) for reduce in ("bfloat16", "float32") for tied in (True, False)),
        *((4, "bfloat16", True), (4, "float32", False)),
    ],
)
def test_in_bf16_all_stages_agree_bit_for_bit_with_one_micro_batch(
    pool: WorkerPool, dp: int, reduce: str, tied: bool
) -> None:
    values = merged(ODD, {"data": {"micro_batch": 8 // dp}, "bf16": {"reduce_dtype": reduce}, "model": {"tied": tied}})
    plain = assemble(pool.run(dp, train_stage, "stage 0", values, RandomTask(), ("bf16",)))
    for stage in SHARDED:
        assert_same_bits(plain, assemble(pool.run(dp, train_stage, stage, values, RandomTask(), ("bf16",))))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["bf16", ""], ids=["bf16", "fp32"])
def test_stages_that_accumulate_whole_gradients_agree_bit_for_bit(pool: WorkerPool, precision: str, tied: bool) -> None:
    values = merged(ODD, {"data": {"micro_batch": 1}, "model": {"tied": tied}})
    extra = (precision,) if precision else ()
    plain = assemble(pool.run(2, train_stage, "stage 0", values, RandomTask(), extra))
    assert_same_bits(plain, assemble(pool.run(2, train_stage, "stage 1", values, RandomTask(), extra)))
    once: Values = {"zero": {"reduce_every_micro_batch": False}}
    assert_same_bits(plain, assemble(pool.run(2, train_stage, "stage 3", values, RandomTask(), extra, once)))


def test_stages_that_reduce_every_micro_batch_agree_bit_for_bit_with_each_other(pool: WorkerPool) -> None:
    """With stage 0 they cannot: each micro-batch's sum over ranks is rounded to bf16 before it is added in fp32."""
    values = merged(ODD, {"data": {"micro_batch": 1}})
    plain, two, three = (
        assemble(pool.run(2, train_stage, stage, values, RandomTask(), ("bf16",)))
        for stage in ("stage 0", "stage 2", "stage 3")
    )
    assert_same_bits(two, three)
    for name, gradient in plain.gradients[0].items():  # later ones are those of other weights
        unit = 2**-8 * gradient.abs().max()
        assert float((two.gradients[0][name] - gradient).abs().max()) < 2 * unit, name


@pytest.mark.parametrize("stage", SHARDED)
def test_clipping_changes_only_the_last_bits_of_agreement(pool: WorkerPool, stage: str) -> None:
    values = merged(ODD, {"data": {"micro_batch": 4}, "optim": {"clip": 0.3}})
    plain, sharded = (
        assemble(pool.run(2, train_stage, s, values, RandomTask(), ("bf16",))) for s in ("stage 0", stage)
    )
    assert max(plain.norms) > 0.3
    assert plain.norms[0] == pytest.approx(sharded.norms[0], rel=1e-6)
    for name, gradient in plain.gradients[0].items():
        torch.testing.assert_close(sharded.gradients[0][name], gradient, rtol=1e-6, atol=0)
    assert plain.losses == pytest.approx(sharded.losses, rel=1e-4)
