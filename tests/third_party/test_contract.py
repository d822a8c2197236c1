"""What used to need a change of the kernel is done by plugins here, through hooks alone, in every layout alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from femto_core.plugins import activate
from femto_core.trainer import Trainer
from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, worst_difference
from tests.cli.commands import TINY_FLAGS, femto, install_plugin
from tests.third_party import context
from tests.third_party.runs import PLUGINS, Values, make, train, trainer_with

BOUND = 1e-9
PACKED = RandomTask(documents=3)
TP, PP, ZB = {"tp": {"size": 2}}, {"pp": {"size": 2}}, {"pp": {"size": 2, "schedule": "zb"}}
SP = {"tp": {"size": 2, "sequence_parallel": True}}
BUCKETS = {"zero": {"bucket_mib": 0.006}}
INTERLEAVED: Values = {
    "model": {"layers": 4},
    "pp": {"size": 2, "schedule": "interleaved"},
    "sac": {"policy": "selective"},
}
Layout = tuple[int, Values, tuple[str, ...]]
EVERYWHERE: dict[str, Layout] = {
    "dp2": (2, {}, ()),
    "dp2-zero1-bf16": (2, BUCKETS, ("zero1", "bf16")),
    "tp2-zero3": (4, TP, ("tp", "zero3")),
    "pp2-zero2": (4, {**PP, **BUCKETS}, ("pp", "zero2")),
    "zb": (2, ZB, ("pp",)),
    "interleaved-sac-zero3": (4, INTERLEAVED, ("pp", "sac", "zero3")),
}
CASES: dict[str, dict[str, Layout]] = {
    "pairs": {**EVERYWHERE, "sp2-pp2": (4, {**SP, **PP}, ("tp", "pp"))},
    "polar": {**EVERYWHERE, "tp4-copies": (4, {"tp": {"size": 4}}, ("tp", "bf16"))},
    "side_loss": {**EVERYWHERE, "sac": (2, {"sac": {"policy": "full"}}, ("sac",))},
    "reference": EVERYWHERE,
    "curriculum": {name: EVERYWHERE[name] for name in ("dp2", "tp2-zero3", "pp2-zero2")},
    "masters_in_files": {
        "bf16": (2, {}, ("bf16",)),
        "tp2-zero3-bf16": (4, TP, ("tp", "zero3", "bf16")),
        "no bf16": (2, {}, ("zero3",)),
    },
    "context": {
        "cp2": (2, {}, ()),
        "cp2-dp2": (4, {}, ()),
        "cp4": (4, {"context": {"size": 4}}, ()),
        "cp2-tp2": (4, TP, ("tp",)),
        "cp2-sp2": (4, SP, ("tp",)),
        "cp2-pp2-sac": (4, PP, ("pp", "sac")),
        "cp2-dp2-zero3": (4, {}, ("zero3",)),
        "cp2-dp2-zero2 over both": (4, {"zero": {"axes": ["dp", "cp"], "bucket_mib": 0.006}}, ("zero2", "bf16")),
    },
    "hybrid": {
        "all-reduce": (4, {}, ()),
        "zero1": (4, {"zero": {"axes": ["shard"], "bucket_mib": 0.006}}, ("zero1",)),
        "zero2": (4, {"zero": {"axes": ["shard"], "bucket_mib": 0.006}}, ("zero2", "bf16")),
        "zero3": (4, {"zero": {"axes": ["shard"]}}, ("zero3",)),
        "zero3 over both": (4, {"zero": {"axes": ["dp", "shard"]}}, ("zero3",)),
    },
}
ONLY_LAYOUT = ("context", "hybrid", "masters_in_files")
"""Plugins that change no number: one process trains without them."""


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Callable[..., Record]:
    """Train in one process on whole global batches; each problem once."""
    known: dict[str, Record] = {}

    def train_once(third: Sequence[str], values: Values, task: RandomTask) -> Record:
        key = f"{third} {values} {task}"
        if key not in known:
            known[key] = assemble(pool.run(1, train, third, {**values, "data": {"micro_batch": 8}}, (), task))
        return known[key]

    return train_once


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, of in CASES.items() for layout in of])
def test_a_third_partys_plugin_trains_as_one_process(
    pool: WorkerPool, alone: Callable[..., Record], name: str, layout: str
) -> None:
    ranks, values, plugins = CASES[name][layout]
    rows = 1 + (len(name) + len(layout)) % 2
    problem = {**{key: section for key, section in values.items() if key == "model"}, "train": {"steps": 3}}
    tied = layout in ("dp2", "zb", "cp2-pp2-sac", "zero2", "bf16")
    problem["model"] = {**problem.get("model", {}), "tied": tied}
    one = alone(() if name in ONLY_LAYOUT else (name,), problem, PACKED)
    settings = {**values, **problem, "data": {"micro_batch": rows}}
    several = assemble(pool.run(ranks, train, (name,), settings, plugins, PACKED))
    assert worst_difference(one, several) < BOUND


@pytest.mark.parametrize("name", ["pairs", "polar", "side_loss", "reference", "curriculum"])
def test_what_the_plugin_computes_is_not_what_femto_computes_without_it(
    alone: Callable[..., Record], name: str
) -> None:
    values = {"train": {"steps": 3}}
    assert worst_difference(alone((), values, PACKED), alone((name,), values, PACKED)) > 1e-3


def leak_across_documents(values: Values, plugins: Sequence[str]) -> dict[str, Any]:
    """Train with attention that takes a whole row for one document."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: None, *, context: Any, **named: Any) -> Any:
        whole = torch.arange(context.positions.shape[1]).expand_as(context.positions)
        joined = type(context)(context.group, context.rank, whole)
        return real(module, query, key, value, mask, context=joined, **named)

    real = context.attend
    with mock.patch.object(context, "attend", attend):
        return train(("context",), values, plugins, PACKED)


def test_a_leak_between_documents_across_the_cut_is_seen(pool: WorkerPool, alone: Callable[..., Record]) -> None:
    values = {"train": {"steps": 2}, "data": {"micro_batch": 2}}
    one = alone((), {"train": {"steps": 2}}, PACKED)
    assert worst_difference(one, assemble(pool.run(2, leak_across_documents, values, ()))) > 1e-3


# A loader with a state: resumed exactly.


def run_of(folder: Path, **train_section: int) -> Values:
    return {"train": train_section, "run": {"dir": str(folder)}, "checkpoint": {"resume": "auto"}}


def train_and_save(folder: Path, steps: int) -> None:
    trainer = trainer_with(("curriculum",), run_of(folder, steps=6, stop_after=steps))
    trainer.train()
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()


def train_the_rest(folder: Path) -> dict[str, Any]:
    trainer = trainer_with(("curriculum",), run_of(folder, steps=6))
    trainer.train()
    found = {"start": trainer.loader.state_dict(), "weights": [s.master.detach().clone() for s in trainer.shares]}
    trainer.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_that_follows_the_loss_resumes_exactly(pool: WorkerPool, tmp_path: Path, ranks: int) -> None:
    [uninterrupted, *_] = pool.run(ranks, train_the_rest, tmp_path / "whole")
    pool.run(ranks, train_and_save, tmp_path / "cut", 3)
    [resumed, *_] = pool.run(ranks, train_the_rest, tmp_path / "cut")
    assert uninterrupted["start"]["start"] > 0
    assert resumed["start"] == uninterrupted["start"]
    for mine, whole in zip(resumed["weights"], uninterrupted["weights"], strict=True):
        assert torch.equal(mine, whole)


# An observer.


def observe(failing: bool) -> list[tuple[Any, ...]]:
    trainer = trainer_with(("observer",), {"train": {"steps": 2}})
    [observer] = [p for p in trainer.hooks.manager.get_plugins() if type(p).__name__ == "Observer"]

    def fail(_: Trainer) -> None:
        raise ZeroDivisionError("a fault")

    patch = mock.patch.object(type(trainer), "train_step", fail) if failing else mock.MagicMock()
    with patch, contextlib.suppress(ZeroDivisionError):
        trainer.train()
    trainer.close()
    return [(*seen[:-1], repr(seen[-1])) if seen[0] == "end" else seen for seen in observer.seen]


def test_an_observer_is_told_who_trains_and_how_training_ended(pool: WorkerPool) -> None:
    first, second = pool.run(2, observe, False)
    steps = [[("step begin", n, n - 1), ("step end", n, n), ("log", n, ["grad_norm"], 0)] for n in (1, 2)]
    assert first == [("begin", 0), *steps[0], *steps[1], ("end", 2, "None")]
    assert second == [seen for seen in first if seen[0] != "log"]
    [failed] = pool.run(1, observe, True)
    assert failed[-1] == ("end", 0, "ZeroDivisionError('a fault')")


# `femto verify`, on plugins that it has never heard of.


VERIFIED: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "pairs": ("tp,zero3", ("--tp.size", "2", "--model.vocab-size", "48"), "pairs", "tp, zero3"),
    "polar": ("zero2,tp", ("--tp.size", "2"), "polar", "zero2, tp"),
    "side_loss": ("pp,sac", ("--pp.size", "2"), "side_loss", "pp, sac"),
    "curriculum": ("zero1", (), "curriculum", "zero1"),
    "reference": ("zero3", (), "reference", "zero3"),
    "context": ("zero3", (), "none", "context, zero3"),
    "hybrid": ("zero3", ("--zero.axes", "shard"), "none", "hybrid, zero3"),
    "masters_in_files": ("bf16", (), "none", "masters_in_files, bf16"),
}
"""Plugin -> femto's plugins beside it, flags, and the plugins of both runs and of the distributed one alone."""


@pytest.mark.parametrize("name", VERIFIED)
def test_femto_verify_proves_a_third_partys_plugin(tmp_path: Path, name: str) -> None:
    beside, words, content, layout = VERIFIED[name]
    module, _, cls = PLUGINS[name].partition(":")
    source = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    env = install_plugin(tmp_path / "site", name, source, cls)
    sizes = ("--model.layers", "2", "--model.kv-heads", "2")
    command = ["verify", "--plugins", f"{name},{beside}", "--nproc", "4", "--steps", "2", *TINY_FLAGS, *sizes, *words]
    done = femto(command, tmp_path, env)
    assert done.code == 0, done.out + done.err
    assert f"plugins in both runs: {content}; only in the distributed run: {layout}\n" in done.out
    assert "\nequal within 1e-09" in done.out


def test_wrapping_a_seat_claims_nothing_and_is_listed() -> None:
    found = {info.name: info for info in activate(["bf16"], objects={"mine": make("masters_in_files")}).active}
    assert found["mine"].seats == ()
    assert found["mine"].wraps == ("femto_precision",)
    assert found["bf16"].seats == ("femto_precision",)
