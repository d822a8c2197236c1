"""What of a model does not fit a run: rotary scaling that follows micro-batches, router losses, experts in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from femto_core.errors import UserError
from femto_ops.fitting import rotary_problem, router_problem
from femto_tools.testing import RandomTask, WorkerPool, assemble, make_trainer, train_job, worst_difference
from tests.models import tiny_config

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


def values_for(folder: Path, family: str, **changes: Any) -> dict[str, dict[str, Any]]:
    tiny_config(family, **changes).save_pretrained(folder)
    return {"model": {"path": str(folder), "weights": "random"}, "train": {"steps": 2}, "optim": {"warmup": 0}}


def refusal(values: dict[str, dict[str, Any]]) -> str:
    try:
        trainer = make_trainer(values, (), {"random_task": RandomTask()})
    except UserError as error:
        return str(error)
    trainer.close()
    return ""


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **more}


@pytest.mark.parametrize("seq_len", [8, 9])
def test_frequencies_that_change_with_a_micro_batch_are_refused_beyond_the_models_length(
    world_of_one: None, tmp_path: Path, seq_len: int
) -> None:
    values = values_for(tmp_path, "llama", max_position_embeddings=8, rope_parameters=rope("dynamic"))
    said = refusal({**values, "data": {"seq_len": seq_len}})
    assert said.startswith("data.seq_len = 9 is more than max_position_embeddings = 8") if seq_len == 9 else said == ""


def test_a_long_ropes_two_sets_are_refused_where_a_micro_batch_would_choose() -> None:
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = tiny_config("phi3", rope_parameters=rope("longrope", **factors), **lengths)
    assert rotary_problem(config, 16) == ""
    assert "original_max_position_embeddings = 16" in rotary_problem(config, 17)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_fixed_frequencies_are_not_refused(kind: str) -> None:
    config = tiny_config("llama", max_position_embeddings=8, rope_parameters=rope(kind))
    assert rotary_problem(config, 1000) == ""


@pytest.mark.parametrize("family", MIXTURES)
def test_a_router_loss_is_refused_and_not_left_out(world_of_one: None, tmp_path: Path, family: str) -> None:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    said = refusal(values_for(tmp_path, family, **MIXTURES[family], **changes))
    assert said.startswith("config.json asks for a router loss (output_router_logits, router_aux_loss_coef 0.02)")


@pytest.mark.parametrize("changes", [{"output_router_logits": False}, {"router_aux_loss_coef": 0.0}], ids=str)
def test_a_router_loss_that_counts_nothing_is_no_obstacle(changes: dict[str, Any]) -> None:
    config = tiny_config("mixtral", **{"output_router_logits": True, "router_aux_loss_coef": 0.1, **changes})
    assert router_problem(config) == ""


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_train_in_float64_as_one_process(pool: WorkerPool, tmp_path: Path, family: str) -> None:
    values = values_for(tmp_path, family, **MIXTURES[family])
    one, two = (assemble(pool.run(size, train_job, values, ())) for size in (1, 2))
    assert all(map(math.isfinite, one.losses))
    assert worst_difference(one, two) < 1e-9
