"""What `replace_with_fused` replaces in each family, what it leaves alone, and that results do not change."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from femto_ops.fused import RMSNorm, SwiGLUMLP, replace_with_fused

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LAYER = ["input_layernorm", "mlp", "post_attention_layernorm"]
# SmolLM2 is published as a Llama with tied embeddings.
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES), LAYER),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZES, mlp_bias=True, attention_bias=True), LAYER),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True), LAYER),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES), LAYER),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES), LAYER),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES), [*LAYER, "self_attn.k_norm", "self_attn.q_norm"]),
}


def build(family: str, *, scale_norms: bool = True) -> PreTrainedModel:
    cls, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    model: PreTrainedModel = cls(config)
    if scale_norms:  # a weight of ones would hide that it is not applied
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, 1.0, 0.2)
    return model


def results(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the logits and every gradient of a fixed loss."""
    nn.Module.to(model, dtype)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.autograd.backward(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_replaced_in_full_and_keeps_every_name(family: str) -> None:
    cls, config, parts = FAMILIES[family]
    with torch.device("meta"):
        model = cls(config)
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    keys, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    state = torch.get_rng_state()
    replaced = replace_with_fused(model)
    assert sorted(replaced) == sorted([f"model.layers.{i}.{part}" for i in range(2) for part in parts] + ["model.norm"])
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == modules
    assert torch.equal(torch.get_rng_state(), state)
    assert replace_with_fused(model) == []


# Bounds relative to the largest entry: fp32 rounding through two layers; a few bf16 roundings of 2^-8 each.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 2**-5)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_do_not_change(family: str, dtype: torch.dtype, bound: float) -> None:
    want = results(build(family), dtype)
    fused = build(family)
    assert replace_with_fused(fused)
    got = results(fused, dtype)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).abs().max() <= bound * tensor.abs().max(), name


def test_a_layer_saves_less_than_before() -> None:
    """The difference is exactly what is recomputed: normalised rows, their fp32 copies, and silu(gate)."""

    def saved_bytes(model: PreTrainedModel) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = model(input_ids=torch.zeros(2, 16, dtype=torch.int64), use_cache=False)
        del outputs
        return sum(storages.values())

    before, fused = build("llama"), build("llama")
    replace_with_fused(fused)
    rows, h, i, layers = 32, 32, 48, 2
    norms = 2 * layers + 1
    want = 4 * rows * (norms * h + layers * i)
    assert saved_bytes(before) - saved_bytes(fused) == want


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_the_mode_is_kept(mode: bool) -> None:
    model = build("llama").train(mode)
    replace_with_fused(model)
    assert all(module.training is mode for module in model.modules())


def test_gemma_is_left_alone() -> None:
    gemma = GemmaForCausalLM(GemmaConfig(**SIZES))
    assert replace_with_fused(gemma) == []


def test_a_shared_norm_stays_shared() -> None:
    norm = LlamaRMSNorm(8)
    model = nn.ModuleDict({"a": norm, "b": norm})
    assert replace_with_fused(model) == ["a", "b"]
    assert model["a"] is model["b"]
    assert isinstance(model["a"], RMSNorm)


class RootMeanRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y: Tensor = super().forward(x)
        return y if gate is None else y * gate


class WideRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.float())
        return y.float()


class BrokenRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("this kernel needs a GPU")


class DroppingMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)  # type: ignore[no-untyped-call]


class SwappedMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return y


def hooked_norm() -> nn.Module:
    norm = LlamaRMSNorm(8)
    norm.register_forward_hook(lambda module, args, output: output)
    return norm


@pytest.mark.parametrize(
    "odd",
    [
        RootMeanRMSNorm(8),
        GatedRMSNorm(8),
        WideRMSNorm(8),
        BrokenRMSNorm(8),
        DroppingMLP(LlamaConfig(**SIZES)),  # type: ignore[no-untyped-call]
        SwappedMLP(LlamaConfig(**SIZES)),  # type: ignore[no-untyped-call]
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="gelu")),  # type: ignore[no-untyped-call]
        hooked_norm(),
    ],
    ids=lambda module: re.sub(r"\W.*", "", type(module).__name__),
)
def test_modules_that_look_alike_but_compute_something_else_are_left_alone(odd: nn.Module) -> None:
    assert replace_with_fused(nn.ModuleDict({"odd": odd})) == []


def test_a_projection_that_is_replaced_later_is_called() -> None:
    model = build("llama")
    replace_with_fused(model)
    mlp = model.get_submodule("model.layers.0.mlp")
    assert isinstance(mlp, SwiGLUMLP)
    mlp.down_proj = nn.Identity()
    assert mlp(torch.zeros(1, 32)).shape == (1, 48)
