"""Extensions that a third party would want of a training system, each a plugin through hooks alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch

from femto_checkpoint.export import export
from femto_checkpoint.options import ExportConfig
from femto_core import hookspecs
from femto_core.batch import Batch, plain_positions
from femto_core.build import build_stage
from femto_core.checkpoint import ExportTensor
from femto_core.config import config_class, make_config
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.mesh import Mesh
from femto_core.plugins import activate
from femto_core.trainer import Trainer
from femto_tools.testing import QUIET, TINY, Record, WorkerPool, assemble, record_training, worst_difference
from tests.third_party import scaled_linear
from tests.third_party.runs import Values, make, train, trainer_with

BOUND = 1e-9
TP, PP = {"tp": {"size": 2}}, {"pp": {"size": 2}}
SP = {"tp": {"size": 2, "sequence_parallel": True}}
BUCKETS = {"zero": {"bucket_mib": 0.003}}
PAIRS = {"data": {"micro_batch": 2}}
Layout = tuple[int, Values, tuple[str, ...], tuple[str, ...]]
"""Ranks, settings, femto's plugins, and third parties' plugins that only lay the run out."""
CASES: dict[str, dict[str, Layout]] = {
    "lora": {
        "dp2": (2, {}, (), ()),
        "zero3": (2, {}, ("zero3",), ()),
        "pp2-zero2": (4, {**PP, **BUCKETS}, ("pp", "zero2"), ()),
        "bf16": (2, {}, ("bf16",), ()),
        "tp2": (2, TP, ("tp",), ("lora_tp",)),
        "sp2-zero3": (4, SP, ("tp", "zero3"), ("lora_tp",)),
        "tp4-copies": (4, {"tp": {"size": 4}}, ("tp",), ("lora_tp",)),
    },
    "experts": {
        "ep2": (2, {}, (), ("expert_parallel",)),
        "ep2-dp2": (4, {}, (), ("expert_parallel",)),
        "ep2-dp2-zero2": (4, BUCKETS, ("zero2",), ("expert_parallel",)),
        "ep2-dp2-zero3 over both": (4, {"zero": {"axes": ["dp", "ep"]}}, ("zero3",), ("expert_parallel",)),
        "pp2-ep2-sac": (4, {**PP, "sac": {"policy": "full"}}, ("pp", "sac"), ("expert_parallel",)),
    },
    "offload": {"dp2-zero3": (2, {}, ("zero3",), ()), "zb": (2, {"pp": {"size": 2, "schedule": "zb"}}, ("pp",), ())},
    "v_schedule": {
        "v2": (2, {"pp": {"size": 2, "chunks": 2}}, ("pp",), ()),
        "v2-zero2-tied": (4, {"pp": {"size": 2, "chunks": 2}, **BUCKETS}, ("pp", "zero2"), ()),
    },
    "scaled_linear": {"dp2": (2, {}, (), ()), "pp2-zero3": (4, PP, ("pp", "zero3"), ())},
}

ONLY_LAYOUT = ("offload", "v_schedule")
"""Plugins that change no number: one process trains without them."""
ROLLOUTS: dict[str, Layout] = {
    "dp2": (2, PAIRS, (), ()),
    "tp2": (2, {**TP, **PAIRS}, ("tp",), ()),
    "pp2-zero3": (4, {**PP, **PAIRS}, ("pp", "zero3"), ()),
}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Callable[..., Record]:
    """Train in one process on whole global batches; each problem once."""
    known: dict[str, Record] = {}

    def train_once(name: str, model: Mapping[str, Any] = MappingProxyType({})) -> Record:
        key = f"{name} {model}"
        if key not in known:
            values = {"train": {"steps": 3}, "data": {"micro_batch": 8}, "model": dict(model)}
            known[key] = assemble(pool.run(1, train, (name,) if name else (), values))
        return known[key]

    return train_once


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, of in CASES.items() for layout in of])
def test_an_extension_trains_as_one_process(
    pool: WorkerPool, alone: Callable[..., Record], name: str, layout: str
) -> None:
    ranks, values, plugins, beside = CASES[name][layout]
    model = {"layers": 4, "tied": "tied" in layout} if name == "v_schedule" else {}
    settings = {**values, "train": {"steps": 3}, "model": model}
    several = assemble(pool.run(ranks, train, (name, *beside), settings, plugins))
    one = alone("" if name in ONLY_LAYOUT else name, model)
    assert worst_difference(one, several) < BOUND


def test_limits_on_a_layers_input_change_what_it_computes(alone: Callable[..., Record]) -> None:
    assert worst_difference(alone(""), alone("scaled_linear")) > 1e-3


def saving(folder: Path, steps: int, stop_after: int = 0) -> dict[str, Any]:
    """Return settings of a run that resumes from its own folder."""
    run = {"run": {"dir": str(folder)}, "checkpoint": {"resume": "auto"}}
    return {**run, "train": {"steps": steps, "stop_after": stop_after}}


def train_and_save(third: Sequence[str], values: Values, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Train to the end and save; return the folder of the checkpoint and what this rank's loader sampled."""
    trainer = trainer_with(third, values, plugins)
    sampled = record_batches(trainer)
    trainer.train()
    trainer.save()
    trainer.checkpointer.wait()
    logits = trainer.schedule.forward(trainer.stage, sample(), lambda hidden, head: head(hidden))
    trainer.close()
    return {"path": trainer.run_dir / "checkpoints" / f"step-{trainer.step}", "logits": logits, "sampled": sampled}


def sample() -> Batch:
    tokens = torch.arange(16).view(2, 8)
    return Batch(input_ids=tokens, targets=tokens, position_ids=plain_positions(2, 8))


def record_batches(trainer: Trainer) -> dict[int, list[torch.Tensor]]:
    """Keep the rows that the loader gives out, by the number of the step; once for each place of the data axes."""
    known: dict[int, list[torch.Tensor]] = {}
    next_step = trainer.loader.next_step

    def recorded() -> Sequence[Batch]:
        batches = next_step()
        if trainer.mesh.speaks:
            known[trainer.step] = [torch.cat([b.input_ids for b in batches]), torch.cat([b.targets for b in batches])]
        return batches

    setattr(trainer.loader, "next_step", recorded)  # noqa: B010 - mypy knows it as a method
    return known


# Low-rank adapters.


def what_gradients_cover(plugins: Sequence[str]) -> dict[str, bool]:
    trainer = trainer_with(("lora",), {"train": {"steps": 2, "dtype": "float32"}}, plugins)
    gradients: Any = getattr(trainer.sharding, "_gradients")  # noqa: B009 - nothing public names the buckets
    buckets = sum(p.numel() for bucket in gradients._collector.buckets for p in bucket.parameters)
    trained = sum(p.numel() for _, p in trainer.stage.named_parameters() if p.requires_grad)
    found = {
        "only adapters have buckets": 0 < buckets == trained,
        "frozen weights are their own masters": all(s.master is s.compute for s in trainer.shares if not s.trainable),
        "adapters have masters": all(s.master is not s.compute for s in trainer.shares if s.trainable),
        "only adapters are trained": {s.name.rpartition(".")[2] for s in trainer.shares if s.trainable}
        == {"lora_a", "lora_b"},
        "weights are narrow": all(s.compute.dtype == torch.bfloat16 for s in trainer.shares),
        "a step has a gradient": trainer.train_step().grad_norm > 0,
    }
    trainer.close()
    return found


@pytest.mark.parametrize("plugins", [("bf16",), ("bf16", "zero2"), ("bf16", "zero3")])
def test_frozen_weights_have_neither_buckets_nor_masters(pool: WorkerPool, plugins: tuple[str, ...]) -> None:
    for found in pool.run(2, what_gradients_cover, plugins):
        assert all(found.values()), found


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found: torch.Tensor = model(sample().input_ids).logits
    return found


def test_an_export_merges_the_adapters(pool: WorkerPool, tmp_path: Path) -> None:
    [first, _] = pool.run(2, train_and_save, ("lora",), saving(tmp_path / "run", 2), ("zero3",))
    plugin: Any = make("lora")
    export(first["path"], ExportConfig(output=str(tmp_path / "hf")), plugin.femto_export)
    assert torch.allclose(logits_of(tmp_path / "hf").double(), first["logits"], atol=1e-5, rtol=0)

    def drop(tensors: dict[str, ExportTensor], *_: Any) -> None:
        for name in [name for name in tensors if "lora" in name]:
            del tensors[name]

    export(first["path"], ExportConfig(output=str(tmp_path / "without")), drop)
    assert (logits_of(tmp_path / "without").double() - first["logits"]).abs().max() > 1e-4
    with pytest.raises(UserError, match=r"would be exported with .*lora_a, which LlamaForCausalLM does not have"):
        export(first["path"], ExportConfig(output=str(tmp_path / "not merged")))


def refuse_adapters() -> str:
    try:
        trainer_with(("lora",), TP, ("tp",))
    except UserError as error:
        return str(error)
    return ""


def test_adapters_on_layers_that_tp_cuts_need_a_kind(pool: WorkerPool) -> None:
    for said in pool.run(2, refuse_adapters):
        assert said == (
            "tp shards model.layers.0.self_attn.q_proj as a plain linear layer, but LowRankLinear has a forward of "
            "its own; name a kind made for it in [tp.plan]"
        )


# A moving average of the weights.


def averages(values: Values, plugins: Sequence[str]) -> dict[str, Any]:
    """Train to the end and save; return this rank's part of the averages, as weights of a record."""
    trainer = trainer_with(("ema",), values, plugins)
    trainer.train()
    trainer.save()
    trainer.checkpointer.wait()
    part = {
        "losses": [],
        "norms": [],
        "gradients": [],
        "layouts": {s.name: s.layout for s in trainer.shares},
        "weights": {
            s.name: trainer.optimizer.state[s.master]["ema"].clone() for s in trainer.shares if s.master.numel()
        },
    }
    trainer.close()
    return part


def test_a_moving_average_goes_on_in_another_layout_and_is_exported(pool: WorkerPool, tmp_path: Path) -> None:
    whole = assemble(pool.run(2, averages, saving(tmp_path / "whole", 4), ("zero2",)))
    pool.run(2, averages, saving(tmp_path / "cut", 4, 2), ("zero2",))
    resumed = assemble(pool.run(1, averages, saving(tmp_path / "cut", 4), ()))
    assert whole.weights.keys() == resumed.weights.keys()
    assert worst_difference(whole, resumed) < BOUND
    plugin: Any = make("ema")
    for name, change in (("averaged", plugin.femto_export), ("last", None)):
        path = tmp_path / "cut" / "test" / "checkpoints" / "step-4"
        export(path, ExportConfig(output=str(tmp_path / name)), change)
    from safetensors.torch import load_file

    exported, last = (load_file(tmp_path / name / "model.safetensors") for name in ("averaged", "last"))
    for name, average in resumed.weights.items():
        assert torch.equal(exported[name], average.float())
        assert not torch.equal(exported[name], last[name])


# Rollouts.


def roll_out(values: Values, plugins: Sequence[str]) -> dict[str, Any]:
    trainer = trainer_with(("rollouts",), values, plugins)
    sampled = record_batches(trainer)
    rows = trainer.mesh.coordinate(*trainer.mesh.row_axes)
    return {**record_training(trainer), "sampled": sampled, "rows": rows}


def answers(parts: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return all rows of all steps [steps, 2 (inputs, targets), rows, s]."""
    speaking = sorted((part for part in parts if part["sampled"]), key=lambda part: part["rows"])
    steps = speaking[0]["sampled"]
    return torch.stack(
        [torch.stack([torch.cat([part["sampled"][s][i] for part in speaking]) for i in (0, 1)]) for s in steps]
    )


@pytest.mark.parametrize("layout", ROLLOUTS)
def test_answers_are_the_same_in_every_layout(pool: WorkerPool, layout: str) -> None:
    ranks, values, plugins, _ = ROLLOUTS[layout]
    steps = {"train": {"steps": 3}}
    one = pool.run(1, roll_out, {**steps, "data": {"micro_batch": 8}}, ())
    several = pool.run(ranks, roll_out, {**values, **steps}, plugins)
    assert torch.equal(answers(one), answers(several))
    assert worst_difference(assemble(one), assemble(several)) < BOUND
    lengths = (answers(one)[:, 1] >= 0).sum(-1)
    assert lengths.min() < lengths.max()  # some answers end early


def test_rollouts_resume_exactly(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(2, train_and_save, ("rollouts",), {**saving(tmp_path / "whole", 4), **PAIRS})
    pool.run(2, train_and_save, ("rollouts",), {**saving(tmp_path / "cut", 4, 2), **PAIRS})
    resumed = pool.run(2, train_and_save, ("rollouts",), {**saving(tmp_path / "cut", 4), **PAIRS})
    for mine, other in zip(resumed, whole, strict=True):
        assert list(mine["sampled"]) == [2, 3]
        for step, rows in mine["sampled"].items():
            assert all(torch.equal(a, b) for a, b in zip(rows, other["sampled"][step], strict=True))
        assert torch.equal(mine["logits"], other["logits"])


# A stage alone, and its buffers.


def decode(values: Values, plugins: Sequence[str]) -> list[int]:
    """Decode 8 tokens greedily with a frozen stage; compare hidden states and tokens with whole forward passes."""
    from transformers import DynamicCache

    hooks = Hooks(activate([*QUIET, *plugins]).manager)
    untied = {**TINY, "model": {**TINY["model"], "tied": False}, **values}  # tied, it repeats the last token for ever
    config = make_config(config_class(hooks.config_sections()), untied, {})
    axes = [axis for some in hooks.collect(hookspecs.femto_mesh_axes, config=config) for axis in some]
    mesh = Mesh(axes, torch.device("cpu"))
    model = hooks.seat(hookspecs.femto_model, config=config)
    built = build_stage(config, hooks, mesh, model=model, trainable=False)
    statistics = hooks.seat(hookspecs.femto_token_statistics, config=config, mesh=mesh)
    stage = built.stage
    assert not stage.trainable
    assert not stage.module.training
    assert all(share.master is share.compute for share in built.shares)
    assert not getattr(built.sharding, "_gradients")._collector.buckets if mesh.world_size > 1 else True  # noqa: B009

    parameters = inspect.signature(type(stage.body).forward).parameters
    cache, key = DynamicCache(config=stage.config), "cache" if "cache" in parameters else "past_key_values"

    def last(tokens: torch.Tensor, start: int, **named: Any) -> list[Any]:
        """Return all log-probabilities, in descending order, after the last token, and their tokens."""
        positions = torch.arange(start, start + tokens.shape[1])[None]
        with torch.no_grad():
            hidden = stage.forward(tokens, Batch(input_ids=tokens, targets=tokens, position_ids=positions), **named)
            found = statistics.log_probs(hidden[:, -1:], stage.head, tokens[:, :1], top=config.model.vocab_size)
        return [hidden[:, -1], found.top_log_probs, found.top_ids]

    tokens = new = torch.tensor([[1, 3, 9]])
    for _ in range(8):
        with_cache = last(new, tokens.shape[1] - new.shape[1], use_cache=True, **{key: cache})
        whole = last(tokens, 0)
        assert all(torch.allclose(a, b, rtol=BOUND, atol=1e-12) for a, b in zip(with_cache, whole, strict=True))
        new = with_cache[2][:, :1]
        assert torch.equal(new, whole[2][:, :1])
        tokens = torch.cat([tokens, new], 1)
    assert cache.get_seq_length() == 10
    assert all(parameter.grad is None for _, parameter in stage.named_parameters())
    built.close()
    return tokens[0].tolist()


def test_a_stage_without_a_trainer_decodes_with_transformers_cache(pool: WorkerPool, world_of_one: None) -> None:
    alone = decode({}, ())
    assert len(alone) == 11
    assert len(set(alone[3:])) > 3
    for plugins in (("tp",), ("zero3",)):
        values = TP if plugins == ("tp",) else {}
        assert pool.run(2, decode, values, plugins) == [alone, alone]


def keep_own_maximum() -> dict[str, Any]:
    """Train with layers whose maximum is this rank's alone."""
    with mock.patch.object(scaled_linear, "dist"):
        return train(("scaled_linear",), {"train": {"steps": 3}})


def test_a_maximum_that_ranks_do_not_share_is_seen(pool: WorkerPool, alone: Callable[..., Record]) -> None:
    assert worst_difference(alone("scaled_linear"), assemble(pool.run(2, keep_own_maximum))) > 1e-6


def test_a_running_maximum_resumes_under_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    [whole, _] = pool.run(2, train_and_save, ("scaled_linear",), saving(tmp_path / "whole", 4), ("zero2",))
    pool.run(2, train_and_save, ("scaled_linear",), {**saving(tmp_path / "cut", 4, 2), **PP}, ("pp",))
    [resumed] = pool.run(1, train_and_save, ("scaled_linear",), saving(tmp_path / "cut", 4))
    assert torch.allclose(resumed["logits"], whole["logits"], rtol=BOUND, atol=1e-12)
