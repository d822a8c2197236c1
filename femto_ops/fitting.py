"""What of a transformers model does not fit a run: numbers that would depend on how a batch is cut, parts left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

CHANGING = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Rotary scalings that look at the longest position of each micro-batch, and the length above which they change."""
ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "aux_loss_coef")


def fit(model: Any, seq_len: int, dtype: torch.dtype) -> str:
    """Make a transformers `model` compute in `dtype`; return what cannot be trained with it, or an empty string.

    `seq_len` is the length of a row. Experts are computed by plain products in float64, for which torch has no grouped
    ones.
    """
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return rotary_problem(model.config, seq_len) or router_problem(model.config)


def rotary_problem(config: Any, seq_len: int) -> str:
    """Return a sentence if rotary frequencies would change with the longest position of each micro-batch."""
    for values in _rope_parameters(config):
        kind = values.get("rope_type", "default")
        if key := CHANGING.get(kind):
            limit: int = values.get(key) or getattr(config, key, None) or seq_len
            if seq_len > limit:
                return (
                    f"data.seq_len = {seq_len} is more than {key} = {limit} in config.json: beyond it, rope_type "
                    f"{kind!r} takes other frequencies for each micro-batch; set --data.seq-len {limit} or less, or "
                    "another rope_type (yarn, linear)"
                )
    return ""


def router_problem(config: Any) -> str:
    """Return a sentence if transformers would add a router loss, which is no sum over micro-batches, to the loss."""
    if not getattr(config, "output_router_logits", False):
        return ""
    known = {key: getattr(config, key) for key in ROUTER_COEFFICIENTS if hasattr(config, key)}
    wanted = {key: value for key, value in known.items() if value}
    if known and not wanted:
        return ""
    of = ", ".join(f"{key} {value:g}" for key, value in wanted.items())
    return (
        f"config.json asks for a router loss (output_router_logits{of and f', {of}'}): a product of means over all "
        "tokens and layers of a batch, which micro-batches, ranks and stages cannot add up to; set "
        "output_router_logits to false there to train without it, or add a loss of each layer's own by a "
        "plugin (side losses)"
    )


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters of a config: one record, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    yield from [value for value in found.values() if isinstance(value, Mapping)] or [found]
