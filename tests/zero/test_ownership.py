"""Who owns what: every parameter one unit, every element one rank."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from femto_core.hookspecs import hookimpl
from femto_core.layout import ParamLayout
from femto_core.model import FullModel
from femto_tools.testing import RandomTask, WorkerPool, assemble, make_trainer, worst_difference
from femto_zero.units import plan_units
from tests.merging import Values, merged
from tests.zero.tasks import SHARDED, STAGES, HardTask, train_stage, units_of

ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
LAYER = {*ATTENTION, "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
LAYER |= {"input_layernorm.weight", "post_attention_layernorm.weight"}


def units_by_name(values: Values, task: RandomTask) -> tuple[dict[str, list[str]], list[str], dict[str, list[str]]]:
    trainer = make_trainer(values, ("zero3",), {"random_task": task})
    names = {id(module): name for name, module in trainer.stage.module.named_modules()}
    units = {unit.name: [n for flat in unit.flats for n in flat.names] for unit in units_of(trainer)}
    plans, uses = plan_units(trainer.stage)
    modules = {plan: [names[id(module)] for module, used in uses if plan in used] for plan in plans}
    everything = [name for name, _ in trainer.stage.named_parameters()]
    trainer.close()
    return units, everything, modules


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_parameter_belongs_to_exactly_one_unit(pool: WorkerPool, tied: bool) -> None:
    [(units, everything, modules)] = pool.run(1, units_by_name, {"model": {"tied": tied}}, RandomTask())
    layers = {f"model.layers.{n}": {f"model.layers.{n}.{name}" for name in LAYER} for n in range(2)}
    head = set() if tied else {"lm_head.weight"}
    wanted = {"before": {"model.embed_tokens.weight"}, **layers, "after": {"model.norm.weight", *head}}
    assert {name: set(members) for name, members in units.items()} == wanted
    assert list(units) == ["before", "model.layers.0", "model.layers.1", "after"]
    found = [name for members in units.values() for name in members]
    assert len(found) == len(set(found))
    assert set(found) == set(everything)
    assert modules["before"] == ["model.embed_tokens", *(["lm_head"] if tied else [])], "gathered for the head too"
    assert modules["after"] == ["model.norm", *([] if tied else ["lm_head"])]


@attrs.frozen
class ScatteredTask(HardTask):
    """Parameters in odd places: on the body itself, and beside it."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        module = model.module
        module.model.norm.spare = torch.nn.Parameter(torch.empty(3, device="meta"))
        module.extra = torch.nn.Linear(2, 2, device="meta")
        shapes: dict[str, tuple[int, ...]] = {
            "model.norm.spare": (3,),
            "extra.weight": (2, 2),
            "extra.bias": (2,),
        }
        from tests.zero.tasks import WithAdapters

        model.weights = WithAdapters(model.weights, shapes)


def test_nothing_falls_through_wherever_a_plugin_puts_it(pool: WorkerPool) -> None:
    [(units, everything, _)] = pool.run(1, units_by_name, {"model": {"tied": False}}, ScatteredTask())
    assert {"model.norm.spare", "extra.weight", "extra.bias"} <= set(units["after"])
    found = [name for members in units.values() for name in members]
    assert sorted(found) == sorted(everything)
    values: Values = {"train": {"steps": 3}, "data": {"micro_batch": 2}}
    one = assemble(pool.run(1, train_stage, "stage 0", values, ScatteredTask()))
    two = assemble(pool.run(2, train_stage, "stage 3", values, ScatteredTask()))
    assert worst_difference(one, two) < 1e-9


@attrs.frozen
class SharedTask(RandomTask):
    """Both layers use one up-projection."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        first, second = model.module.model.layers
        second.mlp.up_proj.weight = first.mlp.up_proj.weight


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_weight_shared_between_layers_is_there_for_both(pool: WorkerPool, prefetch: int) -> None:
    """It belongs to the first unit, which is then gathered for each."""
    values: Values = {"train": {"steps": 3}, "data": {"micro_batch": 2}}
    one = assemble(pool.run(1, train_stage, "stage 0", values, SharedTask()))
    more: Values = {"zero": {"prefetch": prefetch}}
    two = assemble(pool.run(2, train_stage, "stage 3", values, SharedTask(), (), more))
    assert worst_difference(one, two) < 1e-9


def layouts_of(stage: str, values: Values) -> tuple[dict[str, ParamLayout], dict[str, int], bool]:
    plugins, settings = STAGES[stage]
    trainer = make_trainer(merged(settings, values), plugins, {"random_task": HardTask(adapters=(0,))})
    layouts = {group.name: group.layout for group in trainer.shares}
    sizes = {group.name: group.master.numel() for group in trainer.shares}
    kept = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    only_owned = kept == {id(g.master) for g in trainer.shares if g.master.numel()}
    trainer.close()
    return layouts, sizes, only_owned


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_every_element_is_owned_by_exactly_one_rank(pool: WorkerPool, stage: str, dp: int) -> None:
    values: Values = {"data": {"global_batch": 2 * dp, "micro_batch": 1}}
    ranks = pool.run(dp, layouts_of, stage, values)
    names = list(ranks[0][0])
    assert any(name.endswith("scalar") for name in names)
    for name in names:
        shape = ranks[0][0][name].global_shape
        counts = torch.zeros(shape, dtype=torch.int64)
        for layouts, sizes, only_owned in ranks:
            assert list(layouts) == names
            assert only_owned, "the optimizer sees what is owned, and nothing else"
            layout = layouts[name]
            assert "dp" not in layout.replicated
            for box in layout.owned():
                counts[box.slices()] += 1
            assert sizes[name] == layout.flat[1] - layout.flat[0]
        assert bool((counts == 1).all()), name
    owned: list[Any] = [sum(sizes.values()) for _, sizes, _ in ranks]
    assert max(owned) < 2 * sum(owned) / dp, "shares are about equal"
