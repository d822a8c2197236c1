"""Sizes and FLOPs that follow from a transformers config."""

from __future__ import annotations

from typing import Any


def head_dim(config: Any) -> int:
    """Return the width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def layer_products(config: Any) -> int:
    """Return how many elements the matrices of one layer have: the multiplications of one token with them."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return int(config.hidden_size * (head_dim(config) * heads + 3 * config.intermediate_size))


def flops_per_token(config: Any, seq_len: int) -> float:
    """Return the model FLOPs of forward and backward per token (Chowdhery et al. 2022, appendix B): 6 N + 12 L a s.

    N counts the parameters that multiply (all but the embedding look-up), L the layers, a the width of all heads.
    """
    multiplying = config.num_hidden_layers * layer_products(config) + config.hidden_size * config.vocab_size
    width = config.num_attention_heads * head_dim(config)
    return float(6 * multiplying + 12 * config.num_hidden_layers * width * seq_len)
