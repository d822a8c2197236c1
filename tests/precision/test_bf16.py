"""bf16 compute over fp32 masters: what is wide, what is narrow, and how far from fp32 that leads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.autograd import backward

from femto_core.batch import Batch
from femto_core.build import load_weights
from femto_core.hookspecs import hookimpl
from femto_core.layout import ParamLayout
from femto_core.loss import CrossEntropy, TokenStatistics
from femto_core.mesh import Mesh
from femto_core.model import FullModel, Stage
from femto_core.precision import ParamShare
from femto_core.replicated import AllReduce, LocalSums
from femto_core.weights import SafetensorsWeights
from femto_precision.manager import MixedPrecision
from femto_tools.testing import RandomTask, WorkerPool, assemble, make_trainer, train_job
from tests.merging import Values, merged
from tests.models import tiny_config
from tests.zero.tasks import STAGES, HardTask, train_stage

BF16, F32 = torch.bfloat16, torch.float32
FLOAT32: Values = {"train": {"dtype": "float32"}}


@attrs.frozen
class Ranks:
    """As much of a mesh as cutting shares into groups asks for."""

    sharded: int = 1

    def size(self, *axes: str) -> int:
        return self.sharded if axes else 1


def manager(
    accumulate: torch.dtype = F32, reduce: torch.dtype = BF16, group_bytes: int = 2**20, sharded: int = 1
) -> MixedPrecision:
    mesh = cast("Mesh", Ranks(sharded))
    return MixedPrecision(
        compute=BF16, master=F32, accumulate=accumulate, reduce=reduce, group_bytes=group_bytes, mesh=mesh
    )


# Dtypes.


@attrs.frozen
class ListeningTask(RandomTask):
    """Remembers the dtypes that the loss sees and gives."""

    heard: list[torch.dtype] = attrs.field(factory=list, eq=False)

    @hookimpl
    def femto_loss(self) -> CrossEntropy:
        heard = self.heard

        class Listening(CrossEntropy):
            def __call__(
                self, statistics: TokenStatistics, hidden: torch.Tensor, head: nn.Module, batch: Batch
            ) -> torch.Tensor:
                found = super().__call__(statistics, hidden, head, batch)
                heard[:] = [hidden.dtype, cast("torch.Tensor", head.weight).dtype, found.dtype]
                return found

        return Listening()


def dtypes(stage: str) -> dict[str, Any]:
    plugins, settings = STAGES[stage]
    task = ListeningTask()
    trainer = make_trainer(merged(settings, FLOAT32), (*plugins, "bf16"), {"random_task": task})
    trainer.train_step()
    state = {
        value.dtype
        for entry in trainer.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    }
    parameters = {p.dtype for _, p in trainer.stage.named_parameters()}
    masters = {g.master.dtype for g in trainer.shares}
    buffers = {name: b.dtype for name, b in trainer.stage.module.named_buffers()}
    trainer.close()
    return {"loss": task.heard, "state": state, "parameters": parameters, "masters": masters, "buffers": buffers}


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_bf16_and_loss_masters_and_optimizer_state_fp32(pool: WorkerPool, stage: str) -> None:
    for seen in pool.run(2, dtypes, stage):
        assert seen["loss"] == [BF16, BF16, F32]
        assert seen["state"] == {F32}
        assert seen["parameters"] == {BF16}
        assert seen["masters"] == {F32}
        assert set(seen["buffers"].values()) == {F32}, "rotary frequencies lose their meaning in bf16"


def stay_in_step(stage: str) -> list[str]:
    plugins, settings = STAGES[stage]
    values = merged(settings, FLOAT32, {"optim": {"lr": 1e-5}})
    trainer = make_trainer(values, (*plugins, "bf16"))
    start = {g.name: g.master.detach().clone() for g in trainer.shares}
    wrong: list[str] = []
    for _ in range(3):
        trainer.train_step()
        wrong += [g.name for g in trainer.shares if not torch.equal(g.master.detach().to(BF16), g.compute.detach())]
    still = [g.name for g in trainer.shares if g.master.numel() and torch.equal(g.master, start[g.name])]
    trainer.close()
    return wrong + still


@pytest.mark.parametrize("stage", STAGES)
def test_masters_keep_steps_that_are_too_small_for_bf16(pool: WorkerPool, stage: str) -> None:
    """At a rate of 1e-5 a weight of 1 would never move in bf16; what computes is the master, rounded, and not more."""
    assert pool.run(2, stay_in_step, stage) == [[]] * 2


# Sums over micro-batches and ranks.


@attrs.frozen(eq=False)
class OneWeight:
    """As much of a stage as a synchroniser asks for."""

    weight: nn.Parameter

    @property
    def layouts(self) -> dict[str, ParamLayout]:
        return {"weight": ParamLayout.whole("weight", self.weight.shape, (), ("dp",))}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "weight", self.weight

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        yield from ()


def summed(addends: list[list[float]], precision: MixedPrecision) -> float:
    """Add up `addends` of each rank, a micro-batch each, and over ranks."""
    mesh = Mesh([], torch.device("cpu"))
    weight = nn.Parameter(torch.zeros(4, dtype=BF16))
    sync: Any = AllReduce(mesh, 25.0) if mesh.world_size > 1 else LocalSums()
    sync.attach(cast(Stage, OneWeight(weight)), precision)
    found = []
    for _ in range(2):  # the second step is like the first
        *early, last = addends[mesh.rank]
        for value in early:
            with sync.no_sync():
                backward((weight * value).sum())
        backward((weight * last).sum())
        sync.finish()
        assert weight.grad is not None
        found.append(float(weight.grad[0]))
        weight.grad = None
    sync.close()
    assert found[0] == found[1]
    return found[0]


SMALL = 2.0**-10
"""Too small for bf16 beside 1."""


@pytest.mark.parametrize(
    ("ranks", "accumulate", "reduce", "addends", "expected"),
    [
        pytest.param(1, F32, BF16, [[1.0, SMALL, SMALL]], 1 + 2 * SMALL, id="one rank keeps it"),
        pytest.param(1, BF16, BF16, [[1.0, SMALL, SMALL]], 1.0, id="one rank in bf16 loses it"),
        pytest.param(2, F32, F32, [[1.0, SMALL], [SMALL, SMALL]], 1 + 3 * SMALL, id="fp32 throughout"),
        pytest.param(2, F32, BF16, [[1.0, SMALL], [SMALL, SMALL]], 1.0, id="lost between ranks"),
        pytest.param(2, F32, BF16, [[1.0, *[SMALL] * 8], [0.0]], 1 + 8 * SMALL, id="kept until there are enough"),
        pytest.param(2, BF16, BF16, [[1.0, *[SMALL] * 8], [0.0]], 1.0, id="lost one by one"),
    ],
)
def test_a_small_addend_is_kept_where_sums_are_wide(
    pool: WorkerPool, ranks: int, accumulate: torch.dtype, reduce: torch.dtype, addends: Any, expected: float
) -> None:
    assert pool.run(ranks, summed, addends, manager(accumulate, reduce)) == [expected] * ranks


# Updating in groups.


def grouped(group_mib: float) -> tuple[dict[str, Any], list[int]]:
    counts = []

    class Counting(RandomTask):
        @hookimpl
        def femto_optimizer(self, config: Any, shares: Any) -> torch.optim.Optimizer:
            from femto_core.optim import make_adamw

            optimizer = make_adamw(shares, config.optim)
            optimizer.register_step_pre_hook(
                lambda *_: counts.append(sum(s.master.grad.nbytes for s in shares if s.master.grad is not None))
            )
            return optimizer

    values = merged(FLOAT32, {"bf16": {"group_mib": group_mib}, "data": {"micro_batch": 4}})
    return train_job(values, ("bf16",), Counting()), counts


def test_updating_in_groups_changes_no_bit_and_widens_few_gradients_at_a_time(pool: WorkerPool) -> None:
    whole, small = (pool.run(2, grouped, mib) for mib in (64.0, 0.002))
    for (one, few), (other, many) in zip(whole, small, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())
        for mine, theirs in zip(one["gradients"], other["gradients"], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(gradient, theirs[name]) for name, gradient in mine.items())
        assert len(few) == 6
        assert len(many) >= 5 * 6
        assert max(many) <= max(0.002 * 2**20, 32 * 16 * 4)
        assert sum(many) == sum(few)


def share(numel: int, dtype: torch.dtype = BF16, owned: tuple[int, int] | None = None) -> ParamShare:
    """A parameter of `numel` elements, of which this rank owns the range `owned`."""
    first, last = owned or (0, numel)
    layout = attrs.evolve(ParamLayout.whole("w", (numel,), ()), flat=(first, last))
    if owned is not None:
        layout = attrs.evolve(layout, sharded=frozenset({"dp"}))
    return manager().make_share("w", nn.Parameter(torch.zeros(last - first, dtype=dtype)), layout)


def sizes(groups: Sequence[Sequence[ParamShare]]) -> list[list[int]]:
    return [[share.layout.box.numel for share in group] for group in groups]


def test_groups_hold_every_share_once_in_order_and_as_much_as_fits() -> None:
    shares = [share(n) for n in (10, 20, 100, 1, 1)]
    assert sizes(manager(group_bytes=120).update_groups(shares)) == [[10, 20], [100], [1, 1]]
    assert sum(len(group) for group in manager().update_groups([])) == 0


def test_shares_that_are_their_own_masters_cost_nothing_and_come_first() -> None:
    wide = [share(n, F32) for n in (10, 20, 100)]
    assert sizes(manager(group_bytes=4).update_groups(wide)) == [[10, 20, 100]]
    mixed = [share(7), share(100, F32), share(8), share(200, F32)]
    assert sizes(manager(group_bytes=4).update_groups(mixed)) == [[100, 200, 7], [8]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_cut_alike_however_large_their_own_shares_are(ranks: int) -> None:
    """Rank 0 owns nearly everything, the others next to nothing: each share counts as large as the average one."""
    numels = (12, 6, 60, 6, 6)
    first = [share(n, owned=(0, n)) for n in numels]
    others = [share(n, owned=(0, 0)) for n in numels]
    cut = manager(group_bytes=48, sharded=ranks)
    assert sizes(cut.update_groups(first)) == sizes(cut.update_groups(others))
    assert sizes(cut.update_groups(others)) == {2: [[12, 6], [60], [6, 6]], 3: [[12, 6], [60], [6, 6]]}[ranks]
    one_by_one = manager(group_bytes=1, sharded=ranks).update_groups(others)
    assert sizes(one_by_one) == [[numel] for numel in numels]


# Modules that stay in fp32.


class Gate(nn.Linear):
    """A sum of hidden states in its weight's dtype, as routers have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype in (F32, torch.float64)
        return torch.sigmoid(nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.gate = inner, Gate(width, width, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) * self.gate(x)
        return y


@attrs.frozen
class GatedTask(RandomTask):
    """A model that wants its gates in fp32, and whose `gate_proj` must not be taken for one."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        from femto_core.weights import RandomWeights

        module = model.module
        for layer in module.model.layers:
            layer.mlp = GatedMLP(layer.mlp, module.config.hidden_size)
        module._keep_in_fp32_modules_strict = {"gate"}
        model.weights = RandomWeights(module, 0)


def gated(stage: str) -> tuple[dict[str, torch.dtype], dict[str, bool], float]:
    plugins, settings = STAGES[stage]
    trainer = make_trainer(merged(settings, FLOAT32), (*plugins, "bf16"), {"random_task": GatedTask()})
    found = {name: p.dtype for name, p in trainer.stage.named_parameters()}
    same = {g.name: g.master is g.compute for g in trainer.shares}
    for _ in range(3):
        loss = trainer.train_step().loss
    trainer.close()
    return found, same, loss


def gated_in_groups(group_mib: float) -> dict[str, torch.Tensor]:
    values = {**FLOAT32, "bf16": {"group_mib": group_mib}, "optim": {"warmup": 0, "lr": 1e-2, "clip": 0.01}}
    trainer = make_trainer(values, ("bf16",), {"random_task": GatedTask()})
    for _ in range(3):
        trainer.train_step()
    trainer.close()
    return {share.name: share.master.detach().clone() for share in trainer.shares}


def test_weights_in_fp32_are_clipped_and_updated_once_however_many_groups_there_are(pool: WorkerPool) -> None:
    [whole], [grouped] = (pool.run(1, gated_in_groups, mib) for mib in (64.0, 0.002))
    assert all(torch.equal(weight, grouped[name]) for name, weight in whole.items())


@pytest.mark.parametrize("stage", STAGES)
def test_modules_that_the_model_wants_in_fp32_stay_there(pool: WorkerPool, stage: str) -> None:
    losses = set()
    for found, same, loss in pool.run(2, gated, stage):
        wide = {name for name, dtype in found.items() if dtype == F32}
        assert wide == {f"model.layers.{n}.mlp.gate.{key}" for n in range(2) for key in ("weight", "bias")}
        assert {name for name, is_same in same.items() if is_same} == wide
        losses.add(loss)
    assert len(losses) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_weights_have_no_master(pool: WorkerPool, stage: str) -> None:
    task = HardTask(frozen=("embed_tokens", "layers.0."))
    values = merged(FLOAT32, {"model": {"tied": False}})
    parts = pool.run(2, train_stage, stage, values, task, ("bf16",))
    for part in parts:
        for name, weight in part["weights"].items():
            frozen = "embed_tokens" in name or "layers.0." in name
            assert weight.dtype == (BF16 if frozen else F32), name


# How far from fp32.


def losses(plugins: tuple[str, ...], seed: int) -> list[float]:
    values: Values = {
        "train": {"dtype": "float32", "steps": 20, "seed": seed},
        "model": {"hidden_size": 32, "intermediate_size": 48},
        "data": {"micro_batch": 2},
        "optim": {"lr": 3e-3},
    }
    trainer = make_trainer(values, plugins, {"random_task": RandomTask(rows=16)})
    found = [trainer.train_step().loss for _ in range(20)]
    trainer.close()
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_steps_in_bf16_stay_within_4e_4_of_fp32(pool: WorkerPool, seed: int) -> None:
    plain, mixed = (pool.run(2, losses, plugins, seed)[0] for plugins in ((), ("bf16",)))
    assert plain[-1] < plain[0] - 0.1, "a run that learns nothing would prove nothing"
    assert mixed != plain
    assert max(abs(b / a - 1) for a, b in zip(plain, mixed, strict=True)) < 4e-4


def test_in_float64_masters_are_apart_and_change_no_bit(pool: WorkerPool) -> None:
    one, other = (assemble(pool.run(2, train_job, {}, plugins)) for plugins in ((), ("bf16",)))
    assert one.losses == other.losses
    assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


# Narrow weights in.


@pytest.fixture
def narrow_model(tmp_path: Path) -> Path:
    """A Hugging Face directory of fp16 weights."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(tie_word_embeddings=True)
    folder = tmp_path / "narrow"
    folder.mkdir()
    make: Any = AutoModelForCausalLM.from_config
    model = make(config).to(torch.float16)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    return folder


def masters(stage: str, path: str) -> dict[str, tuple[ParamLayout, torch.Tensor, torch.Tensor]]:
    plugins, settings = STAGES[stage]
    values = merged(settings, FLOAT32, {"model": {"path": path}})
    trainer = make_trainer(values, (*plugins, "bf16"))
    found = {g.name: (g.layout, g.master.detach().clone(), g.compute.detach().clone()) for g in trainer.shares}
    trainer.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_weights_arrive_in_fp32_masters_exactly(pool: WorkerPool, narrow_model: Path, stage: str) -> None:
    from safetensors.torch import load_file

    from tests.conftest import read_flat

    weights = load_file(narrow_model / "model.safetensors")
    for rank in pool.run(2, masters, stage, str(narrow_model)):
        assert set(rank) == set(weights)
        for name, (layout, master, compute) in rank.items():
            wanted = read_flat(weights[name].float(), layout)
            assert master.dtype == F32
            assert torch.equal(master.flatten(), wanted), name
            assert torch.equal(compute.flatten(), wanted.to(BF16)), name


def test_weights_are_not_rounded_to_bf16_on_their_way_into_masters(narrow_model: Path) -> None:
    parameter = nn.Parameter(torch.empty(16, dtype=BF16))
    layout = ParamLayout.whole("model.norm.weight", (16,), ())
    mixed = manager().make_share("model.norm.weight", parameter, layout)
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    load_weights([mixed], SafetensorsWeights(narrow_model, load(narrow_model)))
    assert mixed.master.dtype == F32
    assert torch.equal(mixed.master, torch.ones(16))
