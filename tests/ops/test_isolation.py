"""Which architectures keep packed documents apart: found by trying a tiny model of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.errors import UserError
from femto_ops.isolation import DocumentCheck, leak_between_documents, trains_packed_rows
from femto_ops.memory import counting
from femto_tools.testing import RandomTask, make_trainer

APART = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3")
MIXED = ("qwen3_5_text", "qwen3_next", "granitemoehybrid", "gpt_oss", "afmoe", "minimax")


def full_size(family: str, **changes: Any) -> nn.Module:
    """Return a model of the family's own default sizes, on the meta device."""
    attention = "eager" if family == "gpt_oss" else "sdpa"
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model: nn.Module = make(AutoConfig.for_model(family, **changes), attn_implementation=attention)
    return model


@pytest.mark.parametrize("family", APART)
def test_attention_that_hears_of_restarting_positions_keeps_documents_apart(family: str) -> None:
    assert leak_between_documents(full_size(family)) == ""


@pytest.mark.parametrize("family", MIXED)
def test_states_convolutions_and_masks_without_positions_are_found(family: str) -> None:
    model = full_size(family)
    assert leak_between_documents(model) == (
        f"{type(model).__name__} lets a document see the one before it in its row, so rows must hold one document each"
    )


def test_a_leak_in_one_layer_of_many_is_found() -> None:
    kinds = ["full_attention"] * 5 + ["linear_attention"] + ["full_attention"] * 2
    assert "Qwen3NextForCausalLM" in leak_between_documents(
        full_size("qwen3_next", num_hidden_layers=8, layer_types=kinds)
    )
    all_heard = full_size("qwen3_next", num_hidden_layers=8, layer_types=["full_attention"] * 8)
    assert leak_between_documents(all_heard) == ""


def test_trying_a_large_llama_needs_a_few_megabytes_and_leaves_everything_as_it_was() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    model: Any = full_size("llama", num_hidden_layers=8, vocab_size=128256, **sizes)
    before, state = model.config.to_dict(), torch.get_rng_state()
    leak_between_documents(full_size("llama"))  # loads what is loaded once
    with counting(torch.device("cpu")) as memory:
        assert leak_between_documents(model) == ""
        assert memory.take_peak() < 4 * 2**20, "a copy of another size is tried"
    assert model.config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_cannot_be_tried_is_not_taken_to_keep_documents_apart() -> None:
    model: Any = full_size("llama")
    model.config.hidden_act = "none such"
    assert leak_between_documents(model).startswith("a small LlamaForCausalLM could not be tried")
    assert leak_between_documents(nn.Linear(2, 2)) == "", "a model of another library answers for itself"


def rows(positions: list[int], targets: list[int]) -> Batch:
    ids, places = torch.tensor([targets]), torch.tensor([positions])
    return Batch(input_ids=ids, targets=ids, position_ids=places)


def test_only_rows_that_train_a_second_document_are_packed() -> None:
    assert trains_packed_rows(rows([0, 1, 0, 1], [5, 6, 7, 8]))
    assert not trains_packed_rows(rows([0, 1, 2, 3], [5, 6, 7, 8]))
    assert not trains_packed_rows(rows([0, 1, 0, 1], [5, 6, IGNORE_INDEX, IGNORE_INDEX])), "padding"


def test_the_model_is_tried_once_and_only_for_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def no_leak(model: Any) -> str:
        tried.append(model)
        return ""

    monkeypatch.setattr("femto_ops.isolation.leak_between_documents", no_leak)
    check = DocumentCheck("model")
    for batch in [rows([0, 1], [1, 1]), *[rows([0, 0], [1, 1])] * 3]:
        assert check.problem_of([batch]) == ""
    assert tried == ["model"]


@pytest.mark.parametrize("documents", [1, 2])
def test_training_refuses_packed_rows_of_such_a_model_before_its_first_step(
    world_of_one: None, tmp_path: Any, documents: int
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 4}
    kinds = ["full_attention", "linear_attention"]
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=32, num_key_value_heads=1, head_dim=16, layer_types=kinds, **sizes, **linear
    )
    config.save_pretrained(tmp_path)
    values = {"model": {"path": str(tmp_path), "weights": "random"}, "train": {"dtype": "float32"}}
    trainer = make_trainer(values, (), {"random_task": RandomTask(documents=documents)})
    try:
        if documents == 1:
            trainer.train_step()
            return
        with pytest.raises(UserError, match="step 1 has rows of several documents, but Qwen3_5ForCausalLM lets a"):
            trainer.train_step()
        assert trainer.step == 0
    finally:
        trainer.close()
