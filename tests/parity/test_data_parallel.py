"""Data parallelism against one process: the same losses, gradients, norms and weights, however a batch is split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.data import DistributedDataLoader
from femto_core.hookspecs import hookimpl
from femto_core.loss import BatchLoss
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.optim import LRSchedule
from femto_core.precision import ParamShare, Precision
from femto_core.replicated import AllReduce, Replicated
from femto_core.schedule import Schedule, Sequential
from femto_core.sharding import ShardingStrategy
from femto_tools.testing import (
    TINY,
    RandomRows,
    RandomTask,
    Record,
    WorkerPool,
    assemble,
    make_trainer,
    train_job,
    worst_difference,
)
from femto_tools.workers import WorkerFailedError

BOUND = 1e-9
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
Values = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def whole_batches(pool: WorkerPool) -> Callable[..., Record]:
    """Train in one process on whole global batches; each setting once for the module."""
    known: dict[str, Record] = {}

    def train(values: Values, task: RandomTask) -> Record:
        key = f"{values} {task}"
        if key not in known:
            known[key] = assemble(pool.run(1, train_job, with_data(values, micro_batch=8), (), task))
        return known[key]

    return train


def with_data(values: Values, **data: Any) -> Values:
    return {**values, "data": {**values.get("data", {}), **data}}


def model(family: str = "llama", tied: bool = True) -> Values:
    return {"model": {"family": family, "tied": tied}}


def split(pool: WorkerPool, dp: int, micro_batch: int, values: Values, task: RandomTask) -> Record:
    return assemble(pool.run(dp, train_job, with_data(values, micro_batch=micro_batch), (), task))


# The promise.


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
def test_any_split_of_a_global_batch_trains_alike(
    pool: WorkerPool, whole_batches: Callable[..., Record], dp: int, micro_batch: int
) -> None:
    task = RandomTask(documents=3)
    assert worst_difference(whole_batches(model(), task), split(pool, dp, micro_batch, model(), task)) < BOUND


@pytest.mark.one_in(3)
@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_alike_on_four_ranks(
    pool: WorkerPool, whole_batches: Callable[..., Record], family: str, tied: bool, documents: int
) -> None:
    values, task = model(family, tied), RandomTask(documents=documents)
    one = whole_batches(values, task)
    assert worst_difference(one, split(pool, 4, 1, values, task)) < BOUND
    assert ("lm_head.weight" in one.weights) is not tied


@pytest.mark.parametrize("masked", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_with_unequal_numbers_of_targets_train_alike(
    pool: WorkerPool, whole_batches: Callable[..., Record], dp: int, masked: float
) -> None:
    task = RandomTask(masked=masked)
    assert worst_difference(whole_batches(model(), task), split(pool, dp, 1, model(), task)) < BOUND


def test_one_label_here_and_seven_there_weigh_as_eight(pool: WorkerPool) -> None:
    values = with_data({"train": {"steps": 2}, "optim": {"warmup": 0}}, global_batch=2, shuffle=False)
    one = assemble(pool.run(1, train_job, with_data(values, micro_batch=2), (), OneAndSeven()))
    two = assemble(pool.run(2, train_job, values, (), OneAndSeven()))
    assert worst_difference(one, two) < BOUND


class OneAndSeven(RandomTask):
    """Even rows have one valid target, odd ones seven."""

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        return OneAndSevenRows(RandomTask(masked=0.0), config.data.seq_len, config.model.vocab_size, 0)


class OneAndSevenRows(RandomRows):
    def __getitem__(self, index: int) -> Batch:
        row = super().__getitem__(index)
        first = 7 if index % 2 == 0 else 1
        targets = row.targets.clone()
        targets[:, :first] = IGNORE_INDEX
        assert targets.shape == (1, 8)
        return attrs.evolve(row, targets=targets)


def test_a_padded_last_batch_of_an_epoch_trains_alike(pool: WorkerPool) -> None:
    values, task = with_data(model(), remainder="pad"), RandomTask(rows=13)
    one = assemble(pool.run(1, train_job, with_data(values, micro_batch=8), (), task))
    assert worst_difference(one, split(pool, 4, 1, values, task)) < BOUND


def test_the_same_data_for_fifty_steps_and_the_difference_does_not_grow(pool: WorkerPool) -> None:
    values = with_data({"train": {"steps": 50}}, shuffle=False)
    task = RandomTask(rows=8)
    one = assemble(pool.run(1, train_job, with_data(values, micro_batch=8), (), task))
    four = split(pool, 4, 1, values, task)
    assert one.losses[-1] < one.losses[0] - 1, "a run that learns nothing would prove nothing"
    steps = [
        max(float((mine[name] - theirs[name]).abs().max() / mine[name].abs().max()) for name in mine)
        for mine, theirs in zip(one.gradients, four.gradients, strict=True)
    ]
    assert max(steps) < 1e-11
    assert worst_difference(one, four) < BOUND


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_ranks_hold_the_same_bits(pool: WorkerPool, dtype: str) -> None:
    parts = pool.run(4, train_job, {"train": {"dtype": dtype}}, (), RandomTask(documents=3))
    for part in parts[1:]:
        assert part["weights"].keys() == parts[0]["weights"].keys()
        for name, weight in part["weights"].items():
            assert weight.dtype == getattr(torch, dtype)
            assert torch.equal(weight, parts[0]["weights"][name]), name
        for step, gradients in enumerate(part["gradients"]):
            assert gradients.keys() == part["weights"].keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, parts[0]["gradients"][step][name]), name


def test_the_matrix_of_settings_reaches_what_it_means_to_reach(whole_batches: Callable[..., Record]) -> None:
    """Clipped and unclipped steps, and a gradient in every parameter: else the other tests compare zeros."""
    one = whole_batches(model(tied=False), RandomTask(documents=3))
    clip = 1.0  # the default
    assert min(one.norms) < clip < max(one.norms)
    assert all(gradient.abs().max() > 0 for step in one.gradients for gradient in step.values())
    assert len(one.gradients) == TINY["train"]["steps"]


# One process against a textbook: plain transformers, one row and one document at a time, torch's own everything.


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_trains_as_a_textbook_loop_does(pool: WorkerPool, family: str, documents: int) -> None:
    [difference] = pool.run(1, textbook_job, model(family, tied=family == "llama"), RandomTask(documents=documents))
    assert difference < BOUND


def textbook_job(values: Values, task: RandomTask) -> float:
    trainer = make_trainer(values, (), {"random_task": task})
    config = trainer.config
    weights = {share.name: share.master.detach().clone() for share in trainer.shares}
    plain = plain_model(trainer.stage, weights)
    named = dict(plain.named_parameters())
    decayed = [p for p in named.values() if p.dim() > 1]
    others = [p for p in named.values() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=config.optim.betas,
        eps=config.optim.eps,
    )
    losses, norms = [], []
    assert isinstance(trainer.loader, DistributedDataLoader)
    sampler = trainer.loader.sampler
    for step in range(config.train.steps):
        rows = [trainer.dataset[i] for i in sampler.global_rows(step)]
        loss = textbook_loss(plain, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in named.values() if p.grad is not None]
        norms.append(math.sqrt(sum(float((g * g).sum()) for g in gradients)))
        for gradient in gradients:
            gradient *= min(1.0, config.optim.clip / norms[-1])
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = textbook_lr(step, config.train.steps, config.optim.warmup, config.optim.lr)
        optimizer.step()
    infos = [trainer.train_step() for _ in range(config.train.steps)]
    trainer.close()
    one = Record(losses=losses, norms=norms, gradients=[], weights={name: p.detach() for name, p in named.items()})
    ours = Record(
        losses=[info.loss for info in infos],
        norms=[info.grad_norm for info in infos],
        gradients=[],
        weights={share.name: share.master.detach() for share in trainer.shares},
    )
    return worst_difference(one, ours)


def plain_model(stage: Stage, weights: Mapping[str, torch.Tensor]) -> Any:
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    plain: Any = make(stage.config, attn_implementation="sdpa", dtype=torch.float64)
    plain.load_state_dict(weights, strict=not stage.config.tie_word_embeddings)
    for module in plain.modules():
        if hasattr(module, "variance_epsilon"):  # transformers' own norm rounds to fp32 on the way
            module.forward = textbook_norm(module)
    return plain.train()


def textbook_norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scaled = x / torch.sqrt((x * x).mean(-1, keepdim=True) + module.variance_epsilon)
        return cast("torch.Tensor", module.weight * scaled)

    return forward


def textbook_loss(plain: Any, rows: Sequence[Batch]) -> torch.Tensor:
    """Mean over all valid targets, each document alone, from position 0."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        document_ids = (row.position_ids[0] == 0).cumsum(dim=0) - 1
        for number in range(int(document_ids.max()) + 1):
            inside = document_ids == number
            targets = row.targets[0][inside]
            logits = plain(row.input_ids[:, inside]).logits[0]
            if (targets != IGNORE_INDEX).any():
                total = total + F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
            count += int((targets != IGNORE_INDEX).sum())
    return total / count


def textbook_lr(step: int, steps: int, warmup: int, peak: float) -> float:
    """Cosine from the peak down to a tenth at the last step; warm-up rises from 1 / (warmup + 1)."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (steps - 1 - warmup)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


# Faults that the comparison must see: each is one that a real framework had.


def is_seen(pool: WorkerPool, one: Record, task: RandomTask) -> bool:
    """Whether training with `task` on two ranks is told from `one`. A crash is not a finding but a mistake here."""
    try:
        two = split(pool, 2, 1, model(), task)
    except WorkerFailedError:
        raise
    except AssertionError:  # ranks disagree
        return True
    try:
        return worst_difference(one, two) > BOUND
    except (AssertionError, ValueError):  # other parameters, or another number of updates
        return True


def summing(mesh: Mesh, sums: AllReduce) -> ShardingStrategy:
    """Return the default strategy with another way to sum."""
    strategy = Replicated(mesh, 25.0)
    strategy._gradients = sums
    return strategy


class Faulty(RandomTask):
    """A base of faults, with nothing wrong yet."""

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        return summing(mesh, AllReduce(mesh, bucket_mib=25.0))


@attrs.frozen
class SomeParameters:
    """A stage that keeps quiet about one of its parameters."""

    stage: Stage
    hidden: str

    @property
    def layouts(self) -> Any:
        return self.stage.layouts

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.stage.named_parameters() if name != self.hidden)

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        return self.stage.named_layers()


@attrs.frozen
class SkipsAParameter(RandomTask):
    """Sums that leave out one parameter."""

    hidden: str = ""

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        hidden = self.hidden

        class Forgetful(AllReduce):
            def attach(self, stage: Stage, precision: Precision) -> None:
                super().attach(cast("Stage", SomeParameters(stage, hidden)), precision)

        return summing(mesh, Forgetful(mesh, 25.0))


class AveragesRanks(RandomTask):
    """Gradients are averaged; AdamW hides the factor from the weights, so only gradients and norms can show it."""

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        class Mean(AllReduce):
            def finish(self) -> None:
                super().finish()
                for bucket in self._collector.buckets:
                    bucket.flat.div_(mesh.world_size)

        return summing(mesh, Mean(mesh, 25.0))


class SyncsEveryMicroBatch(RandomTask):
    """What has been summed already is summed again with the next micro-batch."""

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        class Eager(AllReduce):
            def attach(self, stage: Stage, precision: Precision) -> None:
                super().attach(stage, precision)
                self.counts = 0

            @contextlib.contextmanager
            def no_sync(self) -> Iterator[None]:
                with super().no_sync():
                    yield
                for bucket in self._collector.buckets:
                    mesh.sum(bucket.flat, "dp")

        return summing(mesh, Eager(mesh, 25.0))


class LosesLateSteps(RandomTask):
    """Synchronises four steps and then no more."""

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        class Tiring(AllReduce):
            steps = 0

            def finish(self) -> None:
                super().finish()
                self.steps += 1
                if self.steps == 4:
                    self.close()

        return summing(mesh, Tiring(mesh, 25.0))


class ScheduleFault(RandomTask):
    """A schedule whose micro-batches or scale are tampered with."""

    @staticmethod
    def tamper(micro_batches: Sequence[Batch], scale: torch.Tensor) -> tuple[Sequence[Batch], torch.Tensor]:
        return micro_batches, scale

    @hookimpl
    def femto_schedule(self, mesh: Mesh) -> Schedule:
        tamper = self.tamper

        class Tampering(Sequential):
            def run(
                self,
                stage: Stage,
                micro_batches: Sequence[Batch],
                loss: BatchLoss,
                scale: torch.Tensor,
                sharding: ShardingStrategy,
            ) -> torch.Tensor:
                return super().run(stage, *self._changed(micro_batches, loss, scale), sharding)

            @staticmethod
            def _changed(
                micro_batches: Sequence[Batch], loss: BatchLoss, scale: torch.Tensor
            ) -> tuple[Sequence[Batch], BatchLoss, torch.Tensor]:
                changed, other_scale = tamper(micro_batches, scale)
                return changed, loss, other_scale

        return Tampering(mesh)


class DividesByTheLocalCount(ScheduleFault):
    @staticmethod
    def tamper(micro_batches: Sequence[Batch], scale: torch.Tensor) -> tuple[Sequence[Batch], torch.Tensor]:
        local = sum(batch.valid for batch in micro_batches)
        return micro_batches, torch.tensor(1 / max(1, 2 * local), dtype=torch.float64)


class DropsTheFirstMicroBatch(ScheduleFault):
    @staticmethod
    def tamper(micro_batches: Sequence[Batch], scale: torch.Tensor) -> tuple[Sequence[Batch], torch.Tensor]:
        return micro_batches[1:], scale


class RunsTheLastMicroBatchTwice(ScheduleFault):
    @staticmethod
    def tamper(micro_batches: Sequence[Batch], scale: torch.Tensor) -> tuple[Sequence[Batch], torch.Tensor]:
        return [*micro_batches, micro_batches[-1]], scale


class IgnoresDocuments(ScheduleFault):
    @staticmethod
    def tamper(micro_batches: Sequence[Batch], scale: torch.Tensor) -> tuple[Sequence[Batch], torch.Tensor]:
        places = torch.arange(micro_batches[0].input_ids.shape[1])[None]
        return [attrs.evolve(b, position_ids=places.expand_as(b.input_ids)) for b in micro_batches], scale


class CountsReplicasTwice(RandomTask):
    """Layouts that do not say that dp holds replicas: the norm is sqrt(2) too large."""

    @hookimpl
    def femto_sharding(self, mesh: Mesh) -> ShardingStrategy:
        class Silent(Replicated):
            def allocate(self, stage: Stage, precision: Precision) -> list[ParamShare]:
                shares = super().allocate(stage, precision)
                return [attrs.evolve(s, layout=attrs.evolve(s.layout, replicated=frozenset())) for s in shares]

        return Silent(mesh, 25.0)


class SchedulesOneStepLate(RandomTask):
    @hookimpl
    def femto_lr_schedule(self, config: Any) -> LRSchedule:
        from femto_core.optim import make_lr_schedule

        right = make_lr_schedule(config.optim, config.train.steps)
        return lambda step: right(max(0, step - 1))


FAULTS = [
    SkipsAParameter(hidden="model.norm.weight"),
    SkipsAParameter(hidden="model.embed_tokens.weight"),
    SkipsAParameter(hidden="model.layers.1.mlp.down_proj.weight"),
    AveragesRanks(),
    SyncsEveryMicroBatch(),
    LosesLateSteps(),
    DividesByTheLocalCount(),
    DropsTheFirstMicroBatch(),
    RunsTheLastMicroBatchTwice(),
    CountsReplicasTwice(),
    SchedulesOneStepLate(),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{type(fault).__name__} {getattr(fault, 'hidden', '')}")
def test_a_fault_is_seen(pool: WorkerPool, whole_batches: Callable[..., Record], fault: RandomTask) -> None:
    assert is_seen(pool, whole_batches(model(), RandomTask()), fault)


def test_attention_across_documents_is_seen(pool: WorkerPool, whole_batches: Callable[..., Record]) -> None:
    assert is_seen(pool, whole_batches(model(), RandomTask(documents=3)), IgnoresDocuments(documents=3))


def test_the_bases_of_the_faults_have_none(pool: WorkerPool, whole_batches: Callable[..., Record]) -> None:
    """Else the tests above would see the base, not the fault."""
    one = whole_batches(model(), RandomTask())
    assert not is_seen(pool, one, Faulty())
    assert not is_seen(pool, one, ScheduleFault())
    assert not is_seen(pool, one, SkipsAParameter(hidden="no such parameter"))


# The comparison itself.


def record(**changes: Any) -> Record:
    base = {
        "losses": [1.0, 2.0],
        "norms": [0.5, 0.5],
        "gradients": [{"a": torch.ones(2, dtype=torch.float64)}],
        "weights": {"a": torch.ones(2, dtype=torch.float64)},
    }
    return Record(**{**base, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": [1.0, 2.0 + 1e-8]},
        {"losses": [1.0, math.nan]},
        {"losses": [1.0]},
        {"norms": [0.5, math.inf]},
        {"norms": [math.nan, 0.5]},
        {"gradients": [{"a": torch.tensor([1.0, math.nan], dtype=torch.float64)}]},
        {"gradients": [{"a": torch.tensor([1.0, 1 + 1e-8], dtype=torch.float64)}]},
        {"gradients": [{}]},
        {"gradients": [{"a": torch.ones(1, dtype=torch.float64)}]},
        {"gradients": [{"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(1)}]},
        {"gradients": []},
        {"weights": {"a": torch.tensor([math.nan, 1.0], dtype=torch.float64)}},
        {"weights": {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(1)}},
    ],
    ids=str,
)
def test_the_comparison_sees_a_difference_in_either_run(changes: dict[str, Any]) -> None:
    for one, other in ((record(), record(**changes)), (record(**changes), record())):
        try:
            difference = worst_difference(one, other)
        except (AssertionError, ValueError):  # refused, which is seen too
            difference = math.inf
        assert difference > BOUND


def test_the_comparison_finds_a_run_equal_to_itself() -> None:
    assert worst_difference(record(), record()) == 0
    lossless = record(losses=[math.nan, 2.0])  # a step without a valid target, in both runs
    assert worst_difference(lossless, lossless) == 0


def test_ranks_that_disagree_by_one_bit_or_leave_a_gap_are_refused(pool: WorkerPool) -> None:
    parts = pool.run(2, train_job, {"train": {"steps": 1}, "optim": {"warmup": 0}}, (), RandomTask())
    assemble(parts)
    weight = parts[1]["weights"]["model.norm.weight"]
    weight[0] = torch.nextafter(weight[0], torch.tensor(9.0, dtype=weight.dtype))
    with pytest.raises(AssertionError, match=r"different values of model\.norm\.weight"):
        assemble(parts)
    parts[1]["losses"][0] += 1e-12
    with pytest.raises(AssertionError, match="disagree about losses"):
        assemble(parts)
    parts[1]["losses"] = parts[0]["losses"]
    for part in parts:
        layout = part["layouts"]["model.norm.weight"]
        part["layouts"]["model.norm.weight"] = attrs.evolve(layout, flat=(0, 15))
        part["weights"]["model.norm.weight"] = torch.ones(15, dtype=torch.float64)
    with pytest.raises(AssertionError, match="no rank owns all of"):
        assemble([{**part, "gradients": []} for part in parts])
