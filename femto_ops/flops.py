"""Sizes and FLOPs that follow from a transformers config, and the peaks of devices."""

from __future__ import annotations

from typing import Any

import torch

# Dense bf16 peaks in TFLOP/s, from the vendors' data sheets; matched against torch.cuda.get_device_name.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0, "B200": 2250.0}


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


def known_peak_tflops(device: torch.device) -> float:
    """Return the device's peak where it is known, otherwise 0."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), 0.0)
