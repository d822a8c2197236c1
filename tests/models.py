"""The tiny model of the tests, as transformers configures it: `TINY` of femto_tools.testing, in other words."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from femto_tools.testing import TINY


def tiny_config(family: str = "llama", **changes: Any) -> PretrainedConfig:
    """Return the config of a model of 2 layers with an untied head, and without special tokens."""
    sizes = TINY["model"]
    base: dict[str, Any] = {
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["hidden_size"] // sizes["heads"],
        "vocab_size": sizes["vocab_size"],
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config: PretrainedConfig = AutoConfig.for_model(family, **{**base, **changes})
    return config
