"""Activation checkpointing changes memory and time, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.trainer import Trainer
from femto_ops.memory import LiveBytes
from femto_sac.budget import GIB, Budget, Cost, Load, fit
from femto_sac.policies import POLICIES, policy
from femto_sac.wrapper import ActivationCheckpointWrapper, Treatment
from femto_tools.testing import RandomTask, Record, WorkerPool, make_trainer, train_job, worst_difference

Values = dict[str, dict[str, Any]]
MODEL = {"layers": 4}
POLICY: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "every second": {"policy": "full", "every": 2},
    "selective": {"policy": "selective"},
    "modules": {"policy": "modules", "pattern": "model.layers.*.mlp"},
    "none": {"policy": "none"},
}


@pytest.fixture(scope="module")
def one(pool: WorkerPool) -> Record:
    return pool.train(1, {"model": MODEL})


@pytest.mark.parametrize("name", POLICY)
def test_on_one_process_not_one_bit_changes(name: str, pool: WorkerPool, one: Record) -> None:
    other = pool.train(1, {"model": MODEL, "sac": POLICY[name]}, plugins=("sac",))
    assert worst_difference(one, other) == 0.0


LAYOUTS: list[tuple[int, str, tuple[str, ...], Values]] = [
    (2, "full", ("zero3",), {}),
    (2, "selective", ("zero3",), {"zero": {"reshard_after_forward": False, "prefetch": 2}}),
    (2, "modules", ("zero2",), {}),
    (2, "selective", ("tp",), {"tp": {"size": 2}}),
    (2, "full", ("tp",), {"tp": {"size": 2, "sequence_parallel": True}}),
    (4, "selective", ("tp", "zero3"), {"tp": {"size": 2, "sequence_parallel": True}}),
    (4, "full", ("pp", "zero2"), {"pp": {"schedule": "zb"}}),
    (4, "selective", ("pp", "tp"), {"pp": {"schedule": "interleaved"}, "tp": {"size": 2}}),
    (4, "full", ("pp", "zero3", "bf16"), {"pp": {"schedule": "1f1b"}}),
    (2, "selective", ("pp",), {"pp": {"schedule": "gpipe"}}),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("ranks", "name", "plugins", "values"), LAYOUTS)
def test_with_every_other_plugin_the_numbers_are_those_of_one_process(
    ranks: int, name: str, plugins: tuple[str, ...], values: Values, pool: WorkerPool, one: Record
) -> None:
    settings = {"model": MODEL, "sac": POLICY[name], **values}
    assert worst_difference(one, pool.train(ranks, settings, plugins=("sac", *plugins))) < 1e-9


class Dropout(RandomTask):
    """Attention weights are dropped out, and the first layers frozen."""

    @hookimpl
    def femto_transform_model(self, model: Any) -> None:
        for layer in model.module.model.layers:
            layer.self_attn.attention_dropout = 0.3
        for parameter in [*model.module.model.embed_tokens.parameters(), *model.module.model.layers[0].parameters()]:
            parameter.requires_grad_(False)


@pytest.mark.parametrize("name", ["full", "selective"])
def test_dropout_draws_the_same_numbers_again_and_gradients_pass_frozen_layers(name: str, pool: WorkerPool) -> None:
    values = {"model": {**MODEL, "tied": False}}
    without, with_it = (
        pool.run(1, train_job, {**values, **extra}, plugins, Dropout())[0]
        for extra, plugins in (({}, ()), ({"sac": POLICY[name]}, ("sac",)))
    )
    assert with_it["losses"] == without["losses"]
    for mine, theirs in zip(with_it["gradients"], without["gradients"], strict=True):
        assert mine.keys() == theirs.keys()
        assert "model.layers.1.mlp.up_proj.weight" in mine
        assert "model.layers.0.mlp.up_proj.weight" not in mine
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def names_and_bytes(settings: Values, plugins: tuple[str, ...]) -> tuple[list[str], list[str], int, int]:
    """Return parameter names, state-dict keys, bytes held after forward, and all bytes after backward."""
    trainer = make_trainer(settings, plugins)
    [batch, *_] = trainer.loader.next_step()
    with LiveBytes(torch.device("cpu")) as counter:
        hidden = trainer.stage.forward(batch.input_ids, batch)
        held = counter.live()
        torch.autograd.backward(hidden.sum())
        del hidden
        for _, parameter in trainer.stage.named_parameters():
            parameter.grad = None
        after = counter.live()
    names = [name for name, _ in trainer.stage.named_parameters()]
    return names, list(trainer.stage.module.state_dict()), held, after


def test_names_stay_memory_shrinks_and_nothing_is_left(pool: WorkerPool) -> None:
    base = {"model": {**MODEL, "hidden_size": 32, "intermediate_size": 96}, "data": {"micro_batch": 8, "seq_len": 16}}
    found = {
        name: pool.run(1, names_and_bytes, {**base, "sac": section}, ("sac",))[0] for name, section in POLICY.items()
    }
    plain = pool.run(1, names_and_bytes, base, ())[0]
    for names, keys, _, after in found.values():
        assert (names, keys) == plain[:2]
        assert after <= plain[3]
    held = {name: values[2] for name, values in found.items()}
    assert held["none"] == plain[2]
    assert held["full"] < held["selective"] < held["none"]
    assert held["full"] < held["every second"] < held["none"]
    assert held["full"] < held["modules"] < held["none"]
    assert held["full"] < 0.1 * held["none"]


def gathers(settings: Values, plugins: tuple[str, ...]) -> int:
    """Return how many vectors were gathered in one step under ZeRO-3."""
    from unittest import mock

    from femto_ops import collectives

    trainer = make_trainer(settings, plugins)
    trainer.train_step()
    with mock.patch.object(collectives, "all_gather", wraps=collectives.all_gather) as calls:
        trainer.train_step()
    trainer.close()
    return calls.call_count


def test_recomputation_under_zero3_gathers_no_more_than_backward_does_anyway(pool: WorkerPool) -> None:
    settings: Values = {"model": MODEL, "data": {"micro_batch": 4}}
    [plain, *_] = pool.run(2, gathers, settings, ("zero3",))
    [full, *_] = pool.run(2, gathers, {**settings, "sac": POLICY["full"]}, ("zero3", "sac"))
    assert full == plain


def test_a_cache_is_never_filled_twice() -> None:
    class Caching(nn.Module):
        def forward(self, x: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            assert not use_cache
            return x * 2

    wrapper = ActivationCheckpointWrapper(Caching(), lambda *_: Treatment.RECOMPUTE)
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward(wrapper(x, use_cache=True).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_the_wrapper_passes_on_attributes_and_training_mode() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    inner.attention_type = "full_attention"  # type: ignore[assignment]
    wrapper = ActivationCheckpointWrapper(inner, lambda *_: Treatment.KEEP)
    assert wrapper.attention_type == "full_attention"
    assert wrapper.keeps_rng
    assert list(wrapper.state_dict()) == list(inner.state_dict())
    wrapper.train(False)
    assert not inner.training
    assert not inner[1].training
    with pytest.raises(AttributeError):
        _ = wrapper.nothing_of_that_name


def test_a_policy_of_ones_own_needs_no_change_here(pool: WorkerPool, one: Record) -> None:
    other = pool.run(1, train_with_own_policy)[0]
    assert other == one.losses


def train_with_own_policy() -> list[float]:
    if "last" not in POLICIES:

        @policy("last")
        def last(name: str, layer: nn.Module, section: Any) -> Mapping[str, Treatment]:
            return {"": Treatment.RECOMPUTE} if name.endswith(".3") else {}

    losses: list[float] = train_job({"model": MODEL, "sac": {"policy": "last"}}, ("sac",))["losses"]
    return losses


# The budget.

COSTS = {Treatment.KEEP: Cost(100, 2.0), Treatment.SELECT: Cost(60, 2.3), Treatment.RECOMPUTE: Cost(10, 3.0)}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (800, {Treatment.KEEP: 4}),
        (799, {Treatment.KEEP: 3, Treatment.SELECT: 1}),
        (480, {Treatment.SELECT: 4}),
        (479, {Treatment.SELECT: 3, Treatment.RECOMPUTE: 1}),
        (80, {Treatment.RECOMPUTE: 4}),
    ],
)
def test_the_least_recomputation_that_fits_is_chosen(limit: int, expected: dict[Treatment, int]) -> None:
    plan = fit(4, COSTS, limit, rows=2)
    assert sum(2 * COSTS[t].held for t in plan) <= limit
    best = min(
        sum(COSTS[t].backward_s for t in other)
        for other in every_plan(4)
        if sum(2 * COSTS[t].held for t in other) <= limit
    )
    assert sum(COSTS[t].backward_s for t in plan) == pytest.approx(best)
    if limit != 479:
        assert {t: plan.count(t) for t in set(plan)} == expected


def every_plan(layers: int) -> list[list[Treatment]]:
    import itertools

    return [list(plan) for plan in itertools.product(Treatment, repeat=layers)]


def test_a_budget_that_nothing_meets_says_the_least_that_would_do() -> None:
    with pytest.raises(UserError, match=r"at least 7\.45e-08 GiB"):
        fit(4, COSTS, 79, rows=2)


def test_ranks_decide_by_the_dearest_of_them() -> None:
    dear = {**COSTS, Treatment.KEEP: Cost(1000, 2.0)}
    plans = []
    for mine in (0, 1):
        budget = Budget(limit_bytes=800, layers=4)
        budget.decide([Load(4, 2, COSTS), Load(4, 2, dear)], mine)
        plans.append(budget._plan)
    assert plans[0] == plans[1]
    assert Treatment.KEEP not in plans[0]


def losses_of(trainer: Trainer) -> list[float]:
    """Train to the end, with all that belongs to a run; return each step's loss."""
    losses: list[float] = []

    class Watch:
        @hookimpl
        def femto_step_end(self, info: Any) -> None:
            losses.append(info.loss)

    trainer.hooks.manager.register(Watch())
    trainer.train()
    return losses


def stages_of_which_one_has_no_layers(section: dict[str, Any]) -> list[float]:
    pipeline = {"pp": {"size": 2, "layers": "0,4"}, "train": {"steps": 3}, "optim": {"warmup": 0}}
    trainer = make_trainer({"model": MODEL, "sac": section, **pipeline}, ("pp", "sac"))
    losses = losses_of(trainer)
    trainer.close()
    return losses


@pytest.mark.parametrize(
    "section", [{"policy": "auto", "budget_gib": 1.0}, {"policy": "modules", "pattern": "model.layers.0.mlp"}]
)
def test_a_stage_without_a_layer_to_wrap_neither_waits_nor_refuses(section: dict[str, Any], pool: WorkerPool) -> None:
    first, last = pool.run(2, stages_of_which_one_has_no_layers, section)
    assert len(first) == 3
    assert first == last


def trained_to_a_budget(gib: float) -> tuple[list[float], list[str]]:
    settings = {"model": MODEL, "train": {"steps": 4}, "optim": {"warmup": 0}, "checkpoint": {"every": 0}}
    trainer = make_trainer({**settings, "sac": {"policy": "auto", "budget_gib": gib}}, ("sac",))
    losses = losses_of(trainer)
    layer: Any = next(layer for _, layer in trainer.stage.named_layers())
    trainer.close()
    return losses, [treatment.value for treatment in layer._choose.__self__._plan]


def test_auto_spends_its_budget_and_changes_no_number(pool: WorkerPool) -> None:
    ample, plan = pool.run(2, trained_to_a_budget, 1.0)[0]
    assert plan == ["keep"] * 4
    answers = pool.run(2, trained_to_a_budget, 15_000 / GIB)
    assert answers[0][0] == ample
    assert answers[0][1] == answers[1][1]
    assert set(answers[0][1]) != {"keep"}


def test_auto_with_too_little_is_refused_on_every_rank(pool: WorkerPool) -> None:
    for answer in pool.run(2, refused, {"policy": "auto", "budget_gib": 1e-7}):
        assert "less than full checkpointing holds" in answer


def refused(section: dict[str, Any]) -> str:
    try:
        trainer = make_trainer({"model": MODEL, "sac": section}, ("sac",))
        trainer.train()
    except UserError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"policy": "fulll"}, "did you mean 'full'"),
        ({"policy": "auto"}, "sac.policy = 'auto' and sac.budget_gib go together"),
        ({"budget_gib": 1.0}, "sac.policy = 'auto' and sac.budget_gib go together"),
        ({"policy": "modules"}, "sac.policy = 'modules' and sac.pattern go together"),
        ({"policy": "modules", "pattern": "model.layers.*.nothing"}, "matches no module of this model's layers"),
    ],
)
def test_bad_settings_get_one_sentence(section: dict[str, Any], words: str, pool: WorkerPool) -> None:
    assert words in pool.run(1, refused, section)[0]
