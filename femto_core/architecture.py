"""The full model, as transformers builds it from a config, on the meta device; refused if femto cannot train it."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from femto_core.errors import UserError
from femto_core.model import FullModel, Head
from femto_core.sections import ModelSection
from femto_core.weights import RandomWeights, SafetensorsWeights, WeightSource
from femto_ops.fused import replace_with_fused
from femto_ops.hugging_face import CONFIG, ModelError, build_causal_lm, check_sizes, read_config
from femto_ops.probes import changes_logits

ANATOMY = ("embed_tokens", "layers", "norm", "rotary_emb")


def build_model(section: ModelSection, seed: int) -> FullModel:
    """Build the model that `section` describes, on the meta device.

    Raises `UserError` for a missing directory, an architecture without the Llama anatomy, sizes that do not fit, and
    weight files that do not match.
    """
    config = read_model_config(section)
    config.use_cache = False
    where = f"{Path(section.path) / CONFIG}: " if section.path else "model."
    try:
        module = build_causal_lm(config, where, attn_implementation=section.attention, dtype=torch.float32)
    except ModelError as error:
        raise UserError(str(error)) from None
    body = getattr(module, "model", None)
    missing = [part for part in ANATOMY if not hasattr(body, part)]
    if missing or not isinstance(getattr(module, "lm_head", None), nn.Linear):
        raise UserError(
            f"{type(module).__name__} lacks the Llama anatomy ({', '.join(missing) or 'lm_head'} not found); "
            "femto trains Llama, Mistral, Qwen2, Qwen3 and their relatives"
        )
    if module.lm_head.bias is not None or changes_logits(module):
        raise UserError(
            f"{type(module).__name__} does more with its logits than hidden states times a matrix (a bias, a scale, a "
            "cap), which femto's loss would leave out; this architecture is not supported"
        )
    weights: WeightSource
    if section.path and section.weights == "load":
        weights = SafetensorsWeights(Path(section.path), module)
    else:
        weights = RandomWeights(module, seed)
    module.lm_head = _head(module.lm_head)
    replace_with_fused(module)
    return FullModel(module, weights)


def read_model_config(section: ModelSection) -> PretrainedConfig:
    """Return transformers' config of the model that `section` describes: its sizes, before there is a model.

    Raises `UserError` for a missing or unreadable directory, and for sizes that do not fit.
    """
    return _load_config(section) if section.path else _make_config(section)


def _head(linear: nn.Linear) -> Head:
    head = Head(linear.in_features, linear.out_features, bias=False, device="meta")
    head.weight = linear.weight  # the same object: a tied head stays tied
    return head


def _load_config(section: ModelSection) -> PretrainedConfig:
    path = Path(section.path)
    if not (path / CONFIG).is_file():
        raise UserError(f"model.path = {section.path!r} is not a Hugging Face model directory: it has no config.json")
    try:
        return read_config(path)
    except ModelError as error:
        raise UserError(str(error)) from None


def _make_config(section: ModelSection) -> PretrainedConfig:
    try:
        left_out = {key: 1 for key in ("vocab_size", "intermediate_size") if not getattr(section, key)}
        check_sizes({**attrs.asdict(section), **left_out}, "model.")
    except ModelError as error:
        raise UserError(str(error)) from None
    if section.hidden_size % section.heads or (section.hidden_size // section.heads) % 2:
        raise UserError(
            f"model.heads = {section.heads} must cut model.hidden_size = {section.hidden_size} into heads of even width"
        )
    if section.heads % section.kv_heads:
        raise UserError(f"model.kv_heads = {section.kv_heads} must divide model.heads = {section.heads}")
    config: PretrainedConfig = AutoConfig.for_model(
        section.family,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size or -(-section.hidden_size * 8 // 96) * 32,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=section.kv_heads,
        head_dim=section.hidden_size // section.heads,
        vocab_size=section.vocab_size,
        tie_word_embeddings=section.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return config
