"""Plans that would compute something else are refused, on any number of ranks, also on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from femto_tools.testing import TINY, WorkerPool
from tests.models import tiny_config
from tests.tp.tools import Values, merged, refusal, tp

ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
NORMS = {f"model.layers.*.{name}_layernorm": "norm" for name in ("input", "post_attention")}
ENDS = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
ROWS = {f"{ATTENTION}.o_proj": "row:q", f"{MLP}.down_proj": "row"}
FUSED = {**ENDS, **NORMS, **ROWS}
SPLIT = {f"{ATTENTION}.{name}_proj": kind for name, kind in (("q", "column:q"), ("k", "column:kv"), ("v", "column:kv"))}
GATED = {f"{MLP}.gate_proj": "column", f"{MLP}.up_proj": "column"}


def of_family(folder: Path, family: str, plan: dict[str, str], **changes: Any) -> Values:
    tiny_config(family, **changes).save_pretrained(folder)
    return {"model": {"path": str(folder), "weights": "random"}, "tp": {"plan": plan}}


def on_any_number(pool: WorkerPool, values: Values) -> str:
    """Return the refusal of two ranks, which one rank must share."""
    said = {*pool.run(1, refusal, merged(tp(1), values)), *pool.run(2, refusal, merged(tp(2), values))}
    assert len(said) == 1, said
    return str(said.pop())


def test_fused_projections_are_refused_as_column_layers(pool: WorkerPool, tmp_path: Path) -> None:
    said = on_any_number(pool, of_family(tmp_path, "phi3", {**FUSED, f"{MLP}.gate_up_proj": "column"}))
    inner = TINY["model"]["intermediate_size"]
    assert said.startswith(
        f"tp.plan: model.layers.0.mlp.gate_up_proj (Linear) has {2 * inner} outputs, but model.layers.0.mlp.down_proj "
        f"takes {inner} inputs; several layers fused into one need a kind of their own"
    )


@pytest.mark.parametrize("kind", ["column:q", "column:kv"])
def test_a_fused_attention_is_refused_as_cut_by_heads(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    said = on_any_number(pool, of_family(tmp_path, "phi3", {**FUSED, f"{ATTENTION}.qkv_proj": kind}))
    which = "4 query" if kind == "column:q" else "2 key/value"
    assert f"self_attn.qkv_proj (Linear) has 32 outputs, and not the {which} heads of 4 by which its kind" in said


@pytest.mark.parametrize("kind", ["head_norm", "norm"])
def test_a_norm_over_all_heads_is_refused(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    own = {"model.layers.*.post_feedforward_layernorm": "norm", "model.layers.*.post_attention_layernorm": "norm"}
    over_heads = {f"{ATTENTION}.{name}_norm": kind for name in "qk"}
    said = on_any_number(pool, of_family(tmp_path, "olmo2", {**ENDS, **ROWS, **SPLIT, **GATED, **own, **over_heads}))
    words = "is no norm over single heads of 4" if kind == "head_norm" else "cut by heads, and sees only some"
    assert said.startswith("tp.plan: model.layers.0.self_attn.q_norm (")
    assert words in said


@pytest.mark.parametrize("pattern", ["model.layers.*.mlp", "model.layers.*.mlp.gate", "model.layers.[*", "lm_head.*"])
def test_a_pattern_that_matches_nothing_is_refused(pool: WorkerPool, pattern: str) -> None:
    said = on_any_number(pool, {"tp": {"plan": {pattern: "column"}}})
    assert said.startswith(f"tp.plan: {pattern} matches no module with parameters")


def test_an_unknown_kind_is_refused_on_one_rank_too(pool: WorkerPool) -> None:
    said = on_any_number(pool, {"tp": {"plan": {"lm_head": "haed"}}})
    assert said.startswith("tp.plan: lm_head = 'haed' is not a parallel kind; did you mean 'head'?")


def test_a_pattern_of_another_stage_is_in_use(pool: WorkerPool) -> None:
    """Each stage of a pipeline has some of the layers; the plan is judged by the whole model."""
    values = merged(tp(2), {"tp": {"plan": {"model.layers.0.mlp.down_proj": "row", "lm_head": "head"}}})
    said = pool.run(4, refusal, merged(values, {"pp": {"size": 2}}), ("tp", "pp"))
    assert said == ["not refused"] * 4


def test_the_plans_of_femtos_own_families_fit(pool: WorkerPool, tmp_path: Path) -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        values: Values = {"model": {"family": family}}
        assert pool.run(1, refusal, merged(tp(1), values)) == ["not refused"]
