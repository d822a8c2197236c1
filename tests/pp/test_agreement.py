"""Pipelines train as one process does, in float64 at 1e-9: any schedule, size, split of the batch, ZeRO stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoConfig

from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, make_trainer, train_job, worst_difference
from tests.pp.tasks import (
    BASE,
    BOUND,
    NAMES,
    ZERO,
    FrozenTask,
    UnequalTask,
    UnsplittableTask,
    Values,
    masters,
    merged,
    pipeline,
    train_third_party,
)

OneProcess = Callable[[Values, RandomTask], Record]
FAMILIES = ("llama", "qwen2", "qwen3")
MESHES: dict[str, tuple[int, int, tuple[str, ...], Values]] = {
    "pp2": (2, 2, (), {}),
    "pp3": (3, 3, (), {}),
    "pp4": (4, 4, (), {}),
    "pp2 dp2": (4, 2, (), {}),
    "pp2 tp2": (4, 2, ("tp",), {"tp": {"size": 2}}),
    "pp2 tp2 sp": (4, 2, ("tp",), {"tp": {"size": 2, "sequence_parallel": True}}),
    "pp2 tp2 dp2": (8, 2, ("tp",), {"tp": {"size": 2}}),
    "pp2 tp2 dp2 sp": (8, 2, ("tp",), {"tp": {"size": 2, "sequence_parallel": True}}),
}
"""Name -> (all ranks, ranks of a pipeline, other plugins, their settings)."""


@attrs.frozen
class Case:
    """The settings of one run."""

    schedule: str
    mesh: str
    zero: str
    tied: bool
    micro_batches: int
    """Micro-batches of a rank in a step."""
    documents: int
    family: str

    @property
    def task(self) -> RandomTask:
        return RandomTask(documents=self.documents)

    @property
    def model(self) -> Values:
        """Return model settings whose layers no size divides, with at least one layer per chunk."""
        layers = 9 if self.schedule == "interleaved" and self.mesh == "pp4" else 7 if self.mesh == "pp3" else 5
        return merged(BASE, {"model": {"layers": layers, "family": self.family, "tied": self.tied}})

    def values(self) -> Values:
        world, size, plugins, settings = MESHES[self.mesh]
        dp = world // size // (2 if "tp" in plugins else 1)
        data = {"data": {"micro_batch": 8 // dp // self.micro_batches}}
        return merged(self.model, pipeline(self.schedule, size), settings, ZERO[self.zero], data)

    @property
    def plugins(self) -> tuple[str, ...]:
        return ("pp", *MESHES[self.mesh][2], *([self.zero] if self.zero else []))

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        return f"{self.schedule}-{self.mesh}-{self.zero or 'plain'}-{head}-m{self.micro_batches}-{self.family}".replace(
            " ", ""
        )


def cases() -> Iterator[Case]:
    """Yield each schedule with each ZeRO stage, and each schedule on each mesh; other settings take turns."""
    for (i, name), (j, zero) in itertools.product(enumerate(NAMES), enumerate(ZERO)):
        count = ((4, 2, 1, 2), (1, 4, 2, 4), (2, 1, 4, 1), (4, 2, 1, 1))[i][j]
        yield Case(name, "pp2 dp2", zero, (i + j) % 2 == 0, count, 1 + 2 * ((i // 2 + j) % 2), FAMILIES[(i + j) % 3])
    for (i, name), (j, mesh) in itertools.product(enumerate(NAMES), enumerate(m for m in MESHES if m != "pp2 dp2")):
        # Under tensor parallelism dp may be 1. ZeRO's layouts apply even then.
        zero = list(ZERO)[(i + j) % 4] if "tp" in mesh else ""
        count = (1, 2, 4)[(i + j) % 3] if "dp2" in mesh else (8, 1, 2, 4)[(i + j) % 4]
        tied = (i + j) % 2 == j // 2 % 2
        yield Case(name, mesh, zero, tied, count, 1 + 2 * ((j + i // 2) % 2), FAMILIES[(i + 2 * j) % 3])


CASES = list(cases())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", [c for c in CASES if MESHES[c.mesh][0] <= 4], ids=str)
def test_a_pipeline_trains_as_one_process(pool: WorkerPool, one_process: OneProcess, case: Case) -> None:
    record = assemble(pool.run(MESHES[case.mesh][0], train_job, case.values(), case.plugins, case.task))
    one = one_process(merged(case.model, {"data": {"micro_batch": 8}}), case.task)
    assert len(one.gradients) == len(record.gradients) == 3
    assert worst_difference(one, record) < BOUND
    assert ("lm_head.weight" in record.weights) is not case.tied


def test_the_cases_reach_what_they_mean_to_reach(one_process: OneProcess) -> None:
    small = [c for c in CASES if MESHES[c.mesh][0] <= 4]
    assert {(c.schedule, c.zero) for c in small if c.mesh == "pp2 dp2"} == set(itertools.product(NAMES, ZERO))
    assert {(c.schedule, c.mesh) for c in CASES} == set(itertools.product(NAMES, MESHES))
    for first, second in (
        ("schedule", "tied"),
        ("schedule", "micro_batches"),
        ("schedule", "documents"),
        ("schedule", "family"),
        ("zero", "tied"),
        ("zero", "documents"),
        ("zero", "family"),
        ("tied", "micro_batches"),
        ("tied", "family"),
        ("documents", "family"),
    ):
        values = {c: (getattr(c, first), getattr(c, second)) for c in small}
        wanted = set(itertools.product({a for a, _ in values.values()}, {b for _, b in values.values()}))
        assert set(values.values()) == wanted, (first, second, wanted - set(values.values()))
    assert {c.micro_batches for c in small if c.zero} == {1, 2, 4}
    assert any(c.micro_batches < MESHES[c.mesh][1] for c in small)
    one = one_process(merged(small[0].model, {"data": {"micro_batch": 8}}), small[0].task)
    assert all(gradient.abs().max() > 0 for step in one.gradients for gradient in step.values())
    assert max(one.norms) > 1.0, "a step is clipped"


@pytest.fixture(scope="module")
def large_pool() -> Iterator[WorkerPool]:
    workers = WorkerPool(8)
    yield workers
    workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if MESHES[c.mesh][0] == 8], ids=str)
def test_three_axes_on_eight_processes(large_pool: WorkerPool, one_process: OneProcess, case: Case) -> None:
    record = assemble(large_pool.run(8, train_job, case.values(), case.plugins, case.task, timeout_s=300))
    one = one_process(merged(case.model, {"data": {"micro_batch": 8}}), case.task)
    assert worst_difference(one, record) < BOUND


@pytest.mark.one_in(2)
@pytest.mark.parametrize("m", [3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_micro_batches_that_no_size_divides(
    pool: WorkerPool, one_process: OneProcess, name: str, m: int
) -> None:
    values = merged(BASE, {"model": {"layers": 8}, "data": {"global_batch": m}})
    one = one_process(merged(values, {"data": {"micro_batch": m}}), RandomTask())
    record = pool.train(4, merged(values, pipeline(name, 4), {"data": {"micro_batch": 1}}), plugins=("pp",))
    assert worst_difference(one, record) < BOUND


@pytest.mark.parametrize("plugins", list(itertools.permutations(["pp", "tp"])), ids="+".join)
def test_the_order_of_plugins_does_not_matter(
    pool: WorkerPool, one_process: OneProcess, plugins: tuple[str, ...]
) -> None:
    """Both plugins replace linear layers. In either order the tensor-parallel layers split their backward."""
    values = merged(BASE, {"model": {"family": "qwen2"}})
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), RandomTask())
    record = pool.train(4, merged(values, pipeline("zb"), {"tp": {"size": 2}}), plugins=plugins)
    assert worst_difference(one, record) < BOUND


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb"])
def test_a_pipeline_of_one_rank(pool: WorkerPool, one_process: OneProcess, name: str) -> None:
    one = one_process(merged(BASE, {"data": {"micro_batch": 8}}), RandomTask())
    record = pool.train(2, merged(BASE, pipeline(name, 1), {"data": {"micro_batch": 1}}), plugins=("pp", "zero2"))
    assert worst_difference(one, record) < BOUND


@pytest.mark.parametrize(("name", "zero"), [("1f1b", "zero1"), ("zb", "zero3"), ("interleaved", "zero2")])
def test_masters_apart_from_weights(pool: WorkerPool, one_process: OneProcess, name: str, zero: str) -> None:
    """Plugin bf16 separates masters from weights, in float64 too."""
    one = one_process(merged(BASE, {"data": {"micro_batch": 8}}), RandomTask())
    record = pool.train(4, merged(BASE, pipeline(name), ZERO[zero]), plugins=("pp", "bf16", zero))
    assert worst_difference(one, record) < BOUND


# Layer types.


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen3 config that mixes full and sliding-window attention."""
    folder: Path = tmp_path_factory.mktemp("qwen3")
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=32,
        use_sliding_window=True,
        sliding_window=2,
        layer_types=[["full_attention", "sliding_attention"][number in (1, 2, 5)] for number in range(6)],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "size"), [("interleaved", 2), ("1f1b", 3), ("zb", 4)])
def test_each_layer_keeps_its_type(
    pool: WorkerPool, one_process: OneProcess, sliding: Path, name: str, size: int
) -> None:
    values: Values = {"train": {"steps": 3}, "model": {"path": str(sliding), "weights": "random"}}
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), RandomTask())
    full = one_process(merged(BASE, {"train": {"steps": 3}, "data": {"micro_batch": 8}}), RandomTask())
    assert one.losses != full.losses
    record = pool.train(size, merged(values, pipeline(name, size)), plugins=("pp",))
    assert worst_difference(one, record) < BOUND


# Partitions by hand.


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "size", "layers", "zero", "tied"),
    [
        ("1f1b", 3, "0,4,0", "", True),
        ("zb", 3, "0,4,0", "", False),
        ("gpipe", 3, "1,3,0", "", True),
        ("1f1b", 2, "0,4", "zero3", True),
        ("1f1b", 2, "0,4", "zero2", False),
        ("1f1b", 2, "4,0", "zero1", True),
        ("zb", 2, "4,0", "zero3", False),
        ("interleaved", 2, "0,2,2,0", "zero2", True),
        ("interleaved", 2, "balanced", "", False),
    ],
)
def test_embedding_or_head_alone_and_unequal_chunks_train_alike(
    pool: WorkerPool, one_process: OneProcess, name: str, size: int, layers: str, zero: str, tied: bool
) -> None:
    values = merged(BASE, {"model": {"tied": tied}})
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), RandomTask())
    world, plugins = (4, ("pp", zero)) if zero else (size, ("pp",))
    record = pool.train(world, merged(values, pipeline(name, size, layers=layers), ZERO[zero]), plugins=plugins)
    assert worst_difference(one, record) < BOUND


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_empty_end_under_sequence_parallelism(pool: WorkerPool, one_process: OneProcess, tied: bool) -> None:
    values = merged(BASE, {"model": {"tied": tied}})
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), RandomTask())
    more: Values = {"tp": {"size": 2, "sequence_parallel": True}}
    for layers in ("0,4", "4,0"):
        record = pool.train(4, merged(values, pipeline("1f1b", 2, layers=layers), more), plugins=("pp", "tp"))
        assert worst_difference(one, record) < BOUND


# Micro-batches that differ in length.


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "world", "size", "plugins"),
    [
        *((name, 2, 2, ()) for name in NAMES),
        ("interleaved", 4, 2, ("zero3",)),
        ("1f1b", 4, 4, ()),
        ("zb", 4, 2, ("tp",)),
    ],
)
def test_the_length_changes_from_micro_batch_to_micro_batch(
    pool: WorkerPool, one_process: OneProcess, name: str, world: int, size: int, plugins: tuple[str, ...]
) -> None:
    """On two ranks the next rank is also the previous one, so that messages of many shapes run between the two."""
    one = one_process(BASE, UnequalTask())
    values = merged(BASE, pipeline(name, size), {"tp": {"size": 2}} if "tp" in plugins else {})
    record = assemble(pool.run(world, train_job, values, ("pp", *plugins), UnequalTask()))
    assert worst_difference(one, record) < BOUND


def lengths() -> set[int]:
    trainer = make_trainer({}, (), {"random_task": UnequalTask()})
    found = {batch.input_ids.shape[1] for batch in trainer.loader.next_step()}
    trainer.close()
    return found


def test_the_micro_batches_of_a_step_do_differ_in_length(pool: WorkerPool) -> None:
    [found] = pool.run(1, lengths)
    assert len(found) > 4


# Frozen parts, layers that cannot be split.

FIRST_HALF = ("embed_tokens", "layers.0.", "layers.1.")
LAST_HALF = ("layers.2.", "layers.3.", "model.norm", "lm_head")
MIDDLE, LINEAR, NOT_LINEAR = ("layers.1.", "layers.2."), ("proj",), ("norm", "embed")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("frozen", "name", "zero"),
    [
        *((frozen, "zb", "") for frozen in (FIRST_HALF, LAST_HALF, MIDDLE, LINEAR, NOT_LINEAR)),
        (FIRST_HALF, "1f1b", ""),
        (FIRST_HALF, "interleaved", "zero1"),
        (FIRST_HALF, "zb", "zero3"),
        (LAST_HALF, "1f1b", "zero2"),
        (LAST_HALF, "zb", "zero3"),
        (MIDDLE, "interleaved", "zero2"),
        (LINEAR, "zb", "zero2"),
        (NOT_LINEAR, "1f1b", "zero3"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value,
)
def test_frozen_parts_train_as_on_one_process(
    pool: WorkerPool, one_process: OneProcess, frozen: tuple[str, ...], name: str, zero: str
) -> None:
    task = FrozenTask(frozen=frozen)
    values = merged(BASE, {"train": {"steps": 3}, "model": {"family": "qwen2", "tied": False}})
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), task)
    more = merged(values, pipeline(name), ZERO[zero], {"data": {"micro_batch": 2}})
    plugins, world = (("pp", zero), 4) if zero else (("pp",), 2)
    record = assemble(pool.run(world, train_job, more, plugins, task))
    assert worst_difference(one, record) < BOUND
    assert any(torch.equal(one.weights[name], record.weights[name]) for name in one.weights if frozen[0] in name)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_that_cannot_be_split_do_both_halves_at_once(
    pool: WorkerPool, one_process: OneProcess, family: str
) -> None:
    task, values = UnsplittableTask(), merged(BASE, {"model": {"family": family}})
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), task)
    record = assemble(pool.run(2, train_job, merged(values, pipeline("zb")), ("pp",), task))
    assert worst_difference(one, record) < BOUND


# Third-party schedules.


@pytest.mark.parametrize(("world", "chunks", "zero"), [(2, 1, ""), (2, 2, ""), (4, 2, "zero2"), (4, 1, "zero3")])
def test_a_third_party_s_schedule_trains_as_one_process(
    pool: WorkerPool, one_process: OneProcess, world: int, chunks: int, zero: str
) -> None:
    one = one_process(merged(BASE, {"data": {"micro_batch": 8}}), RandomTask())
    values = merged(BASE, pipeline("hesitant", chunks=chunks), ZERO[zero])
    if zero:
        values = merged(values, {"data": {"micro_batch": 2}})
    task = RandomTask()
    plugins = ("pp", zero) if zero else ("pp",)
    parts = pool.run(world, train_third_party, "hesitant", values, task, plugins)
    assert worst_difference(one, assemble(parts)) < BOUND


@pytest.mark.parametrize("name", ["crossed", "without weights", "undeclared", "forgetful"])
def test_a_third_party_s_broken_schedule_is_refused_and_neither_hangs_nor_trains_wrong(
    pool: WorkerPool, name: str
) -> None:
    answers = pool.run(2, train_third_party, name, merged(BASE, pipeline(name)), RandomTask(), timeout_s=30)
    wanted = {
        "crossed": "wait for each other forever",
        "without weights": "leaves out W0",
        "undeclared": "invents W0",
        "forgetful": "leaves out B7",
    }[name]
    assert all(isinstance(answer, str) and wanted in answer for answer in answers), answers


# No drift, equal copies, and figures that all ranks share.


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "zero"), [("1f1b", ""), ("zb", "zero3")])
def test_the_same_data_for_fifty_steps_and_the_difference_does_not_grow(
    pool: WorkerPool, one_process: OneProcess, name: str, zero: str
) -> None:
    values: Values = {"train": {"steps": 50}, "data": {"shuffle": False}, "model": {"layers": 4}}
    one = one_process(merged(values, {"data": {"micro_batch": 8}}), RandomTask(rows=8))
    plugins, world = (("pp", zero), 4) if zero else (("pp",), 2)
    more = merged(values, pipeline(name), ZERO[zero], {"data": {"micro_batch": 2}})
    two = assemble(pool.run(world, train_job, more, plugins, RandomTask(rows=8)))
    assert one.losses[-1] < one.losses[0] - 1, "the run must learn, or the comparison would be empty"
    steps = [
        max(float((mine[name] - theirs[name]).abs().max() / mine[name].abs().max()) for name in mine)
        for mine, theirs in zip(one.gradients, two.gradients, strict=True)
    ]
    assert max(steps) < 1e-10
    assert worst_difference(one, two) < BOUND


def ends_after(values: Values, plugins: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return this rank's copy of the tied weight after training: its master, and the forward's weight if unsharded."""
    trainer = make_trainer(values, plugins)
    for _ in range(trainer.config.train.steps):
        trainer.train_step()
    names = [name for name, layout in trainer.stage.layouts.items() if layout.tied]
    found = {key: value for key, value in masters(trainer).items() if key in names}
    whole = [p for name, p in trainer.stage.named_parameters() if name in names]
    assert len(whole) == 1
    seen = {"seen": whole[0].detach().clone()} if whole[0].untyped_storage().nbytes() else {}  # ZeRO-3 has resharded it
    trainer.close()
    assert len(found) == 1
    return {"master": next(iter(found.values())), **seen}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "plugins", "more"),
    [
        ("1f1b", (), {}),
        ("zb", ("zero1",), {}),
        ("interleaved", ("zero3",), {}),
        ("1f1b", ("tp",), {"tp": {"size": 2}}),
        ("gpipe", ("bf16", "zero2"), {}),
    ],
)
def test_tied_copies_stay_equal_bit_for_bit_for_fifty_steps(
    pool: WorkerPool, name: str, plugins: tuple[str, ...], more: Values
) -> None:
    fifty: Values = {"train": {"steps": 50, "dtype": "float32"}, "data": {"micro_batch": 2, "global_batch": 4}}
    values = merged(BASE, fifty, pipeline(name), more)
    found = pool.run(4, ends_after, values, ("pp", *plugins))
    assert all(part["master"].numel() for part in found)
    for first, last in ((0, 2), (1, 3)):  # pp is the outermost axis
        assert found[first].keys() == found[last].keys()
        for key, value in found[first].items():
            assert torch.equal(value, found[last][key]), key
    assert all(part["master"].isfinite().all() for part in found)


def test_the_norm_is_the_whole_model_s(pool: WorkerPool) -> None:
    for plugins, world in ((("pp",), 4), (("pp", "zero2"), 4), (("pp", "zero3"), 4)):
        size = 4 if plugins == ("pp",) else 2
        values = merged(BASE, pipeline("1f1b", size), {"optim": {"clip": 0.0}})
        record = pool.train(world, values, plugins=plugins)
        for norm, gradients in zip(record.norms, record.gradients, strict=True):
            assert norm == pytest.approx(math.sqrt(sum(float((g * g).sum()) for g in gradients.values())), rel=1e-12)


def overflow(values: Values, plugins: tuple[str, ...], at: int, bad: float) -> dict[str, Any]:
    """Train three steps. In the second, put `bad` into a gradient of pipeline rank `at`. Return the steps' figures."""
    trainer = make_trainer(values, plugins)
    reduce = trainer.sharding.finish_gradients

    def spoiled() -> None:
        reduce()
        grads = [g.compute.grad for g in trainer.shares if g.compute.grad is not None and g.compute.grad.numel()]
        if trainer.step == 1 and trainer.mesh.coordinate("pp") == at:
            grads[-1].view(-1)[0] = bad

    trainer.sharding.finish_gradients = spoiled  # type: ignore[method-assign]
    infos, moved = [], []
    for _ in range(3):
        before = masters(trainer)
        infos.append(trainer.train_step())
        moved.append(any(not torch.equal(before[key], value) for key, value in masters(trainer).items()))
    trainer.close()
    return {
        "skipped": [info.skipped for info in infos],
        "norms": [str(info.grad_norm) for info in infos],
        "moved": moved,
        "finite": all(bool(value.isfinite().all()) for value in masters(trainer).values()),
    }


@pytest.mark.parametrize(
    ("zero", "at", "bad"), [("", 0, math.inf), ("", 1, math.nan), ("zero2", 1, math.inf), ("zero3", 0, math.nan)]
)
def test_a_gradient_of_one_rank_that_is_not_finite_makes_all_ranks_skip(
    pool: WorkerPool, zero: str, at: int, bad: float
) -> None:
    values = merged(BASE, pipeline("1f1b"), ZERO[zero], {"model": {"tied": False}})
    plugins = ("pp", zero) if zero else ("pp",)
    first, *others = pool.run(4, overflow, values, plugins, at, bad)
    assert all(other == first for other in others)
    assert first["skipped"] == [False, True, False]
    assert first["moved"] == [True, False, True]
    assert first["finite"]
