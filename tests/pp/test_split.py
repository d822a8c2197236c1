"""Backward in two halves: the layers that defer weight gradients, the sums of both halves, and their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from femto_core.model import Stage
from femto_ops.deferral import WeightGradients
from femto_ops.linear import SplittingLinear
from femto_pp.actions import Backward, Compute, Forward, WeightBackward
from femto_pp.pipeline import Run
from femto_tools.testing import WorkerPool, make_trainer
from tests.pp.tasks import BASE, FrozenTask, PlainLinear, UnsplittableTask, Values, merged, pipeline, pipeline_of


def splitting(bias: bool, weight_grads: WeightGradients) -> tuple[nn.Linear, SplittingLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(5, 3, bias=bias, dtype=torch.float64)
    other: Any = nn.Linear(5, 3, bias=bias, dtype=torch.float64)
    other.load_state_dict(plain.state_dict())
    other.__class__, other.weight_grads = SplittingLinear, weight_grads
    return plain, other


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("frozen", ["", "weight", "bias", "input"])
@pytest.mark.parametrize("later", [True, False], ids=["halves", "whole"])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (5,)], ids=str)
def test_a_linear_layer_in_halves_gives_torch_s_gradients(
    bias: bool, frozen: str, later: bool, shape: tuple[int, ...]
) -> None:
    if frozen == "bias" and not bias:
        return
    store = WeightGradients()
    plain, other = splitting(bias, store)
    x = torch.randn(shape, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(frozen != "input") for _ in range(2)]
    for layer in (plain, other):
        if frozen in ("weight", "bias"):
            getattr(layer, frozen).requires_grad_(False)
    grad = torch.randn(plain(x).shape, dtype=torch.float64)
    plain(inputs[0]).backward(grad)
    y = other(inputs[1])
    if later:
        with store.defer() as halves:
            y.backward(grad)
        assert other.weight.grad is None
        assert other.bias is None or other.bias.grad is None
        halves.compute()
        halves.compute()  # a second call does nothing
    else:
        y.backward(grad)
    for name, parameter in plain.named_parameters():
        mine = other.get_parameter(name).grad
        assert (mine is None) == (parameter.grad is None)
        if mine is not None and parameter.grad is not None:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-12, atol=1e-12)
    if frozen != "input":
        assert inputs[0].grad is not None
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-12, atol=1e-12)


def test_halves_of_two_micro_batches_add_up_in_any_order() -> None:
    store = WeightGradients()
    plain, other = splitting(True, store)
    xs = [torch.randn(4, 5, dtype=torch.float64) for _ in range(2)]
    deferred = []
    for x in xs:
        plain(x).sum().backward()
        with store.defer() as halves:
            other(x).sum().backward()
        deferred.append(halves)
    for halves in reversed(deferred):
        halves.compute()
    assert plain.weight.grad is not None
    torch.testing.assert_close(other.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


def test_deferring_ends_if_backward_fails() -> None:
    store = WeightGradients()
    with pytest.raises(ZeroDivisionError), store.defer():
        raise ZeroDivisionError
    assert store.compute_or_defer([None], lambda: [torch.ones(())])[0] is not None, "gradients are no longer deferred"


def when_gradients_come(values: Values, plugins: tuple[str, ...], task: Any) -> dict[str, set[str]]:
    """Return for each kind of parameter the symbols of the actions that gave its gradient; and the names of modules."""
    trainer = make_trainer(values, plugins, {"random_task": task})
    executor = pipeline_of(trainer)
    compute = executor._compute
    doing = "?"
    seen: dict[str, set[str]] = {}

    def watched(stage: Stage, run: Run, action: Compute) -> None:
        nonlocal doing
        doing = action.symbol
        compute(stage, run, action)

    def note(name: str) -> Any:
        def came(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                seen.setdefault(name, set()).add(doing)

        return came

    executor._compute = watched  # type: ignore[method-assign]
    trainer.sharding.close()  # its hooks would take gradients away
    for name, parameter in trainer.stage.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note(".".join(name.split(".")[-2:])))  # type: ignore[no-untyped-call]
    micro_batches = trainer.loader.next_step()
    order, _ = executor._plan(len(micro_batches))
    assert {a.symbol for a in order} == {"F", "B", "W"}
    scale = torch.ones((), dtype=torch.float64)

    def clear() -> None:
        for _, parameter in trainer.stage.named_parameters():
            parameter.grad = None

    def clearing(stage: Stage, run: Run, action: Compute) -> None:
        clear()
        watched(stage, run, action)

    executor._compute = clearing  # type: ignore[method-assign]
    executor.run(trainer.stage, micro_batches, trainer.loss, scale, trainer.sharding)
    seen["modules"] = {type(m).__name__ for m in trainer.stage.module.modules()}
    seen["left"] = {str(len(executor._links._sending))}
    trainer.close()
    return seen


@pytest.mark.parametrize("tp", [False, True], ids=["plain", "tp"])
def test_weight_gradients_of_linear_layers_come_in_w_and_all_others_in_b(pool: WorkerPool, tp: bool) -> None:
    values = merged(BASE, pipeline("zb"), {"model": {"family": "qwen2", "tied": False}})
    values = merged(values, {"tp": {"size": 2}} if tp else {})
    plugins, world = (("pp", "tp"), 4) if tp else (("pp",), 2)
    answers = pool.run(world, when_gradients_come, values, plugins, FrozenTask())
    for seen in answers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            assert seen[f"{name}.weight"] == {"W"}, name
        for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias"):
            assert seen[name] == {"W"}, name
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            assert seen[name] == {"B"}
        assert ("SplittingLinear" in seen["modules"]) is not tp
        assert ("ColumnParallelLinear" in seen["modules"]) is tp
    assert answers[0]["embed_tokens.weight"] == {"B"}
    assert answers[-1]["lm_head.weight"] == {"B"}


def test_a_layer_that_cannot_split_does_all_in_b(pool: WorkerPool) -> None:
    for seen in pool.run(2, when_gradients_come, merged(BASE, pipeline("zb")), ("pp",), UnsplittableTask()):
        assert seen["q_proj.weight"] == seen["down_proj.weight"] == {"B", "W"}, "of every other layer"
        assert seen["k_proj.weight"] == {"W"}
        assert {PlainLinear.__name__, "SplittingLinear"} <= seen["modules"]


def test_schedules_that_do_not_split_leave_the_model_as_it_is(pool: WorkerPool) -> None:
    for modules in pool.run(2, kinds_of_modules, merged(BASE, pipeline("1f1b"))):
        assert "SplittingLinear" not in modules


def kinds_of_modules(values: Values) -> set[str]:
    trainer = make_trainer(values, ("pp",))
    found = {type(m).__name__ for m in trainer.stage.module.modules()}
    trainer.close()
    return found


def bits(values: Values) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = make_trainer(values, ("pp",))
    losses = [trainer.train_step().loss for _ in range(3)]
    weights = {group.name: group.master.detach().clone() for group in trainer.shares}
    trainer.close()
    return losses, weights


def test_schedules_with_the_same_order_of_sums_give_equal_losses(pool: WorkerPool) -> None:
    """1F1B and ZB sum micro-batches in the same order, so that their losses are equal even in fp32."""
    fp32 = merged(BASE, {"train": {"dtype": "float32"}})
    for one, other in zip(*(pool.run(2, bits, merged(fp32, pipeline(name))) for name in ("1f1b", "zb")), strict=True):
        assert one[0] == other[0]
        for name, value in one[1].items():
            torch.testing.assert_close(value, other[1][name], rtol=1e-6, atol=1e-7, msg=name)


def orders_of_halves(values: Values) -> list[str]:
    trainer = make_trainer(values, ("pp",))
    order, _ = pipeline_of(trainer)._plan(4)
    trainer.close()
    return [type(action).__name__ for action in order]


def test_forward_backward_and_weight_gradients_are_all_there_at_run_time(pool: WorkerPool) -> None:
    for found in pool.run(2, orders_of_halves, merged(BASE, pipeline("zb"))):
        for kind in (Forward, Backward, WeightBackward):
            assert found.count(kind.__name__) == 4
