"""Initial values are those of transformers' own rule for every module, through all that hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from femto_ops.initial_weights import InitialWeights
from femto_ops.memory import free_memory

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 3,
    "num_dense_layers": 1,
}
FAMILIES = ("llama", "qwen3", "qwen3_next", "afmoe", "qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3")


def model_of(family: str, device: str) -> Any:
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        return make(AutoConfig.for_model(family, **SIZES))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_the_mean_and_spread_that_transformers_gives_it(family: str) -> None:
    torch.manual_seed(0)
    theirs = model_of(family, "cpu")
    ours = InitialWeights(model_of(family, "meta"), seed=0)
    for name, parameter in theirs.named_parameters():
        values, wanted = ours.read(name), parameter.detach()
        spread = wanted.std(correction=0)
        assert values.shape == wanted.shape
        if values.numel() < 64 and spread:  # too few to compare
            assert values.isfinite().all()
            continue
        assert values.std(correction=0) == pytest.approx(float(spread), rel=0.25), name
        assert values.mean() == pytest.approx(float(wanted.mean()), abs=float(spread) * 0.6 + 1e-9), name


def test_what_a_mixture_initialises_within_it_is_not_left_as_it_was_found() -> None:
    ours = InitialWeights(model_of("qwen3_next", "meta"), seed=0)
    gates = [ours.read(f"model.layers.{number}.mlp.gate.weight") for number in (0, 1)]
    assert [float(gate.std()) for gate in gates] == pytest.approx([0.02, 0.02], rel=0.2)
    assert not torch.equal(*gates)
    assert torch.equal(gates[0], ours.read("model.layers.0.mlp.gate.weight"))
    router = InitialWeights(model_of("afmoe", "meta"), seed=0).read("model.layers.1.mlp.router.gate.weight")
    assert torch.equal(router, torch.zeros_like(router)), "the router's own rule comes after its matrix's"


def test_a_row_of_padding_stays_zero_in_a_tied_embedding() -> None:
    values = InitialWeights(model_of("gemma3_text", "meta"), seed=0).read("model.embed_tokens.weight")
    assert not values[3].any()
    assert values[4].any()


def test_a_parameter_that_no_module_initialises_is_refused_by_name() -> None:
    model = model_of("llama", "meta")
    model.model.layers[1].mlp.scale = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM gives model\.layers\.1\.mlp\.scale no initial values"):
        InitialWeights(model, seed=0)


def test_values_that_do_not_fit_in_memory_are_refused_before_they_are_made() -> None:
    model = model_of("llama", "meta")
    rows = free_memory(torch.device("cpu")) // 256
    model.model.embed_tokens = nn.Embedding(rows, 64, device="meta")
    with pytest.raises(ValueError, match=rf"model\.embed_tokens\.weight of shape \[{rows}, 64\] needs .* GiB are free"):
        InitialWeights(model, seed=0).read("model.embed_tokens.weight")
