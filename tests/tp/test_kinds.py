"""Kinds defined by other packages, plans from TOML, and errors that say what to do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from femto_core.config import config_class, make_config
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.layout import Box
from femto_core.model import FullModel
from femto_core.toml_file import read_toml
from femto_core.weights import WeightSource
from femto_tools.testing import RandomTask, WorkerPool, assemble, make_trainer, worst_difference
from femto_tp.cuts import cut_heads, works
from femto_tp.kinds import KINDS, Context, ParamShard, parallel_kind
from femto_tp.plugin import TPSection
from femto_tp.ranks import Ranks
from femto_tp.regions import copy_to_tp_region, gather_from_tp_region
from tests.tp.tools import Values, merged, normal, refusal, tp, train_tp

BOUND = 1e-9
FIVE: Values = {"train": {"steps": 5}, "data": {"micro_batch": 4}}


# A kind from outside the package: rows are sharded in reverse order, and outputs are gathered.


class Dealt:
    """Shards in reverse order (a strided shard would not be a `Box`)."""

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> ParamShard:
        length = shape[0] // size
        start = shape[0] - (rank + 1) * length
        return ParamShard(box=Box((start, *[0] * (len(shape) - 1)), (length, *shape[1:])))


class DealtLinear(nn.Module):
    def __init__(self, parameters: dict[str, nn.Parameter], ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.bias, self._ranks = parameters["weight"], parameters.get("bias"), ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(copy_to_tp_region(x, self._ranks), self.weight, self.bias)
        return torch.cat(gather_from_tp_region(y, self._ranks).chunk(self._ranks.size, -1)[::-1], -1)


@parallel_kind("dealt")
class DealtKind:
    def loader(self, suffix: str, context: Context) -> Dealt:
        return Dealt()

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        return DealtLinear(parameters, context.ranks)


class WithProjection(nn.Module):
    """An MLP behind a projection of its own."""

    def __init__(self, mlp: Any, h: int) -> None:
        super().__init__()
        self.inner = mlp
        self.before = nn.Linear(h, h, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x + self.before(x).tanh())
        return y


class More:
    """The weights of a model, and generated values, which depend on the name, for parameters it did not have."""

    def __init__(self, base: WeightSource, shapes: dict[str, tuple[int, ...]]) -> None:
        self._base, self._shapes = base, shapes

    def read(self, name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        if name not in self._shapes:
            return self._base.read(name.replace(".inner.", "."), boxes)
        whole = 0.3 * normal(sum(name.encode()), *self._shapes[name])
        return [whole[box.slices()] for box in boxes]


class ProjectionTask(RandomTask):
    """Puts a projection before each MLP, under names that no plan knows."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        h = model.config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for number, layer in enumerate(model.module.model.layers):
            layer.mlp = WithProjection(layer.mlp, h)
            shapes[f"model.layers.{number}.mlp.before.weight"] = (h, h)
            shapes[f"model.layers.{number}.mlp.before.bias"] = (h,)
        model.weights = More(model.weights, shapes)


PLAN = {
    "model.layers.*.mlp.before": "dealt",
    "model.layers.*.mlp.inner.gate_proj": "column",
    "model.layers.*.mlp.inner.up_proj": "column",
    "model.layers.*.mlp.inner.down_proj": "row",
}


@pytest.mark.parametrize("stage", ["", "zero1", "zero3"])
def test_a_kind_of_another_package_loads_and_trains(pool: WorkerPool, stage: str) -> None:
    one = assemble(pool.run(1, train_tp, FIVE, (), ProjectionTask()))
    cut = merged(FIVE, tp(2), {"tp": {"plan": PLAN}})
    two = assemble(pool.run(4, train_tp, cut, (stage,) if stage else (), ProjectionTask()))
    assert "model.layers.1.mlp.before.bias" in two.weights
    assert worst_difference(one, two) < BOUND


def save_and_resume(values: Values, folder: str) -> float:
    """Save under tp in this job, resume, and train; return the losses after the checkpoint."""
    saving = merged(values, {"run": {"dir": folder}})
    trainer = make_trainer(saving, ("tp",), {"random_task": ProjectionTask()})
    trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    wanted = trainer.train_step().loss
    trainer.close()
    again = make_trainer(merged(saving, {"checkpoint": {"resume": "auto"}}), ("tp",), {"random_task": ProjectionTask()})
    found = again.train_step().loss
    again.close()
    assert found == wanted
    return found


def test_a_kind_of_another_package_is_saved_and_resumed(pool: WorkerPool, tmp_path: Path) -> None:
    cut = merged(FIVE, tp(2), {"tp": {"plan": PLAN}})
    assert len(set(pool.run(2, save_and_resume, cut, str(tmp_path)))) == 1


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(ValueError, match="there is a parallel kind 'dealt' already"):
        parallel_kind("dealt")(DealtKind)
    assert isinstance(KINDS["dealt"], DealtKind)


# One more column layer, beside those that the plan names.


class GatedMLP(nn.Module):
    """An MLP with a third matrix on its input, and a linear layer called twice with the same input."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        i, h = mlp.gate_proj.weight.shape
        self.extra_proj = nn.Linear(h, i, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.gate_proj(x)) * self.up_proj(x)
        y: torch.Tensor = self.down_proj(gated * self.extra_proj(x).sigmoid() + self.gate_proj(x.tanh()))
        return y


class GatedTask(RandomTask):
    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        for number, layer in enumerate(model.module.model.layers):
            layer.mlp = GatedMLP(layer.mlp)
            for key, parameter in layer.mlp.extra_proj.named_parameters():
                shapes[f"model.layers.{number}.mlp.extra_proj.{key}"] = tuple(parameter.shape)
        model.weights = More(model.weights, shapes)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize("size", [2, 4])
def test_another_column_layer_in_the_mlp_trains_as_one_process(
    pool: WorkerPool, size: int, sequence_parallel: bool
) -> None:
    """A second group of column layers in one module must not gather the sequence again.

    If a member is called with a tensor computed from the gathered sequence, its gradient must not be summed twice.
    """
    one = assemble(pool.run(1, train_tp, FIVE, (), GatedTask()))
    cut = merged(FIVE, tp(size, sequence_parallel), {"tp": {"plan": {"model.layers.*.mlp.extra_proj": "column"}}})
    many = assemble(pool.run(size, train_tp, cut, (), GatedTask()))
    assert worst_difference(one, many) < BOUND


def test_toml_reaches_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[tp]\nsize = 2\n[tp.plan]\n"model.layers.*.mlp.before" = "dealt"\n"model.x" = "norm"\n')
    config = make_config(config_class({"tp": TPSection}), read_toml(path), {}, str(path))
    assert config.section(TPSection).plan == {"model.layers.*.mlp.before": "dealt", "model.x": "norm"}
    path.write_text('[tp.plan]\n"model.x" = 3\n')
    with pytest.raises(UserError, match=r"tp\.plan"):
        make_config(config_class({"tp": TPSection}), read_toml(path), {}, str(path))


def train_here(values: Values) -> dict[str, Any]:
    """Train where this file, and so its kinds, are imported."""
    return train_tp(values)


def test_later_patterns_win_over_the_familys(pool: WorkerPool) -> None:
    """Layer 0 is sharded by other kinds than layer 1, and one of its matrices is not sharded."""
    one = assemble(pool.run(1, train_tp, FIVE, (), RandomTask()))
    plan = {"model.layers.0.mlp.gate_proj": "dealt_whole", "model.layers.0.mlp.up_proj": "dealt_whole"}
    plan["model.layers.0.mlp.down_proj"] = "whole_linear"
    two = assemble(pool.run(2, train_here, merged(FIVE, tp(2), {"tp": {"plan": plan}})))
    assert worst_difference(one, two) < BOUND


@parallel_kind("dealt_whole")
class DealtWhole(DealtKind):
    """The same kind under another name, for another plan."""


@parallel_kind("whole_linear")
class WholeLinear:
    """A linear layer that is not sharded."""

    def loader(self, suffix: str, context: Context) -> Any:
        return SimpleNamespace(
            shard=lambda shape, rank, size: ParamShard(box=Box((0,) * len(shape), shape), is_cut=False)
        )

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        for key, parameter in parameters.items():
            setattr(module, key, parameter)
        return module


# Errors.


def all_say(pool: WorkerPool, values: Values, size: int = 2, task: RandomTask | None = None) -> str:
    answers = pool.run(size, refusal, values, ("tp",), task)
    assert len(set(answers)) == 1, answers
    assert "\n" not in answers[0]
    return str(answers[0])


def test_a_module_the_plan_does_not_know_is_refused_with_what_to_write(pool: WorkerPool) -> None:
    said = all_say(pool, tp(2), task=ProjectionTask())
    assert said.startswith(
        "tp does not know how to shard model.layers.0.mlp.inner.gate_proj (Linear) of a llama model;"
    )
    assert '[tp.plan] "model.layers.*.mlp.' in said
    named = set(said.rpartition("one of ")[2].split(", "))
    assert named >= {"column", "column:q", "row", "embedding", "head", "norm", "dealt"}


def test_an_unknown_kind_is_refused_with_the_nearest(pool: WorkerPool) -> None:
    said = all_say(pool, merged(tp(2), {"tp": {"plan": {"model.layers.*.mlp.before": "colum"}}}))
    assert said.startswith("tp.plan: model.layers.*.mlp.before = 'colum' is not a parallel kind")
    assert "did you mean" in said
    assert "column" in said


class AdapterTask(RandomTask):
    """Adds to a linear layer, which the plan names, a parameter that its kind does not expect."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        linear = model.module.model.layers[1].mlp.down_proj
        linear.adapter = nn.Parameter(torch.empty(3, linear.in_features, device="meta"))
        model.weights = More(model.weights, {"model.layers.1.mlp.down_proj.adapter": (3, linear.in_features)})


def test_a_parameter_that_its_modules_kind_does_not_know_is_refused_and_not_dropped(pool: WorkerPool) -> None:
    said = all_say(pool, tp(2), task=AdapterTask())
    assert "model.layers.1.mlp.down_proj" in said
    assert "adapter" in said


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "sizes"),
    [(9, 3, 4, "1, 2, 3, 9"), (4, 2, 3, "1, 2, 4"), (6, 2, 4, "1, 2, 6")],
    ids=str,
)
def test_heads_that_cannot_be_cut_are_refused_with_the_sizes_that_can(
    pool: WorkerPool, heads: int, kv_heads: int, size: int, sizes: str
) -> None:
    model = {"model": {"heads": heads, "kv_heads": kv_heads, "hidden_size": 4 * heads}}
    said = all_say(pool, merged(tp(size), model, {"data": {"global_batch": 12}}), size)
    assert said == (
        f"tp.size = {size} cannot divide {heads} attention heads with {kv_heads} key/value heads; "
        f"sizes that can: {sizes}"
    )


def test_every_size_that_is_said_to_work_shares_out_all_heads_with_those_they_read() -> None:
    for heads, key_values in ((9, 3), (4, 4), (8, 2), (12, 4), (5, 1), (16, 16), (6, 3)):
        config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_values, hidden_size=4 * heads)
        group = heads // key_values
        for size in range(1, heads + 3):
            if not works(heads, key_values, size):
                with pytest.raises(UserError, match="sizes that can"):
                    cut_heads(config, size)
                continue
            cut = cut_heads(config, size)
            assert [h for part in cut.queries for h in part] == list(range(heads)), (heads, key_values, size)
            for rank in range(size):
                read = {h // group for h in cut.queries[rank]}
                assert read == set(cut.key_values[rank])
                assert len(cut.queries[rank]) % len(cut.key_values[rank]) == 0
                assert cut.rows("q", rank) == range(4 * cut.queries[rank].start, 4 * cut.queries[rank].stop)


def uneven(values: Values) -> str:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        make_trainer(values, ("tp",)).close()
    return said.getvalue()


def test_an_uneven_cut_is_said_once(pool: WorkerPool) -> None:
    model = {"model": {"heads": 9, "kv_heads": 3, "hidden_size": 36}}
    said = pool.run(2, uneven, merged(tp(2), model))
    assert said == [
        "tp: 9 heads over 2 ranks are uneven: up to 6 heads per rank, at least 3; the smaller ranks idle\n",
        "",
    ]
    assert pool.run(3, uneven, merged(tp(3), model, {"data": {"global_batch": 9}})) == [""] * 3


def test_a_size_that_does_not_divide_the_world_is_refused(pool: WorkerPool) -> None:
    said = all_say(pool, tp(2), 3)
    assert said.startswith("3 processes cannot be laid out as tp 2")
    assert "multiple of 2" in said


def test_rows_that_do_not_divide_are_refused_before_training(pool: WorkerPool) -> None:
    said = all_say(pool, merged(tp(2, True), {"data": {"seq_len": 9}}))
    assert said == (
        "tp.sequence_parallel needs rows of a multiple of 2 tokens, and a rank's rows have 9; set --data.seq-len to a "
        "multiple"
    )
    assert all_say(pool, merged(tp(2, False), {"data": {"seq_len": 9}})) == "not refused"


class Doubled(nn.Linear):
    """Has a linear layer's parameters, and a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@attrs.frozen
class DoubledTask(RandomTask):
    layer: str = "up_proj"

    @hookimpl
    def femto_transform_model(self, model: Any) -> None:
        getattr(model.module.model.layers[1].mlp, self.layer).__class__ = Doubled


@pytest.mark.parametrize("layer", ["up_proj", "down_proj"])
def test_a_layer_with_a_forward_of_its_own_is_refused_rather_than_replaced(pool: WorkerPool, layer: str) -> None:
    said = pool.run(2, refusal, tp(2), ("tp",), DoubledTask(layer=layer))
    assert len(set(said)) == 1
    assert (
        f"tp shards model.layers.1.mlp.{layer} as a plain linear layer, but Doubled has a forward of its own" in said[0]
    )


def short_batch(values: Values) -> str:
    trainer = make_trainer(values, ("tp",))
    [batch] = trainer.loader.next_step()[:1]
    short = copy.copy(batch)
    short = type(batch)(**{k: getattr(batch, k)[:, :7] for k in ("input_ids", "targets", "position_ids")})
    try:
        trainer.stage.forward(short.input_ids, short)
    except UserError as error:
        return str(error)
    finally:
        trainer.close()
    return "not refused"


def test_a_batch_that_does_not_divide_is_refused_in_training(pool: WorkerPool) -> None:
    answers = pool.run(2, short_batch, tp(2, True))
    assert len(set(answers)) == 1
    assert "7 tokens" in answers[0]
    assert "--data.seq-len" in answers[0]


def test_a_negative_size_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"tp\.size = -1"):
        make_config(config_class({"tp": TPSection}), {"tp": {"size": -1}}, {})


def test_size_0_takes_what_divides_the_key_value_heads(pool: WorkerPool) -> None:
    """Four processes without LOCAL_WORLD_SIZE count as one per machine."""
    sizes = pool.run(4, mesh_size, {"tp": {"size": 0}, "model": {"heads": 4, "kv_heads": 2}})
    assert sizes == ["tp 1, dp 4"] * 4


def mesh_size(values: Values) -> str:
    trainer = make_trainer(values, ("tp",))
    mesh = trainer.mesh
    trainer.close()
    return f"tp {mesh.size('tp')}, dp {mesh.size('dp')}"
