"""Model directories as transformers reads them: the config, the model it describes, and the files of its weights.

Nothing here runs code that a directory holds. What transformers answers with an exception of its own, or not at all,
is a `ModelError`: one sentence with the file and the key.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from femto_ops.paths import outside

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
LARGEST_VOCABULARY, LARGEST_SIZE, MOST_LAYERS, MOST_PARAMETERS = 2**31 - 1, 2**24, 4096, 10**14
SIZES = re.compile(r"(_size|_dim|_rank|layers|heads|_experts)$")
VALIDATION = re.compile(r"(?:Class v|V)alidation error for (?:field|validator) '(\w+)': \w+: ")
REQUIRED = {
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "layers", "heads", "kv_heads"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
}
"""Sizes that are at least 1 wherever they are given."""


class ModelError(ValueError):
    """A model directory, or sizes, that make no model; the text is a sentence for the person who chose them."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises `ModelError` where it holds none, however it is damaged."""
    if problem := outside(file.parent, file.name):
        raise ModelError(f"{file} is {problem}; put the file itself there")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged, or cannot be read: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} is damaged: it holds no JSON object")
    return values


def read_config(folder: Path) -> PretrainedConfig:
    """Return transformers' config of the model in `folder`.

    Raises `ModelError` with the file and the key: for a file that is damaged, a model that transformers does not have,
    sizes that no model has, and values that transformers refuses.
    """
    file = folder / CONFIG
    values = read_json(file)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in values:
            raise ModelError(f"{file}: auto_map asks for code from the directory, which femto never runs")
        said = f"model_type = {kind!r} is no model" if "model_type" in values else "it has no model_type, a name"
        raise ModelError(f"{file}: {said} that transformers {transformers.__version__} knows")
    check_sizes(values, f"{file}: ")
    _check_rope(values, f"{file}: ")
    with explained(values, f"{file}: "):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config


def build_causal_lm(config: PretrainedConfig, where: str, **options: Any) -> Any:
    """Return transformers' ...ForCausalLM of `config`, on the meta device. `where` begins the sentence of an error.

    Raises `ModelError` where transformers has no such model, or the parameters are more than any machine holds.
    """
    make: Any = AutoModelForCausalLM.from_config
    values = config.to_dict()
    with explained(values, where), torch.device("meta"):
        model = make(config, trust_remote_code=False, **options)
    largest, count = largest_parameter(model)
    if count > MOST_PARAMETERS:
        raise ModelError(f"{where}{largest_size(values, model)} makes a model of {count:.1e} parameters ({largest})")
    return model


def largest_parameter(model: torch.nn.Module) -> tuple[str, int]:
    """Return the name and shape of the largest parameter, as text, and the number of all values."""
    parameters = dict(model.named_parameters())
    name = max(parameters, key=lambda name: parameters[name].numel())
    return f"{name} has {list(parameters[name].shape)}", sum(p.numel() for p in parameters.values())


def largest_size(values: Mapping[str, Any], model: torch.nn.Module) -> str:
    """Return the size among `values` of a config, as "key = value", that makes the largest parameter large."""
    most = max((max(p.shape, default=0) for p in model.parameters()), default=0)
    sizes = {k: v for k, v in _leaves(values) if isinstance(v, int) and SIZES.search(k) and v <= most}
    key = max(sizes, key=lambda key: sizes[key])
    return f"{key} = {sizes[key]}"


def check_sizes(values: Mapping[str, Any], where: str) -> None:
    """Refuse sizes of 0 or less, and those that no model has. Raises `ModelError` with the key."""
    for key, value in _leaves(values):
        name = key.rpartition(".")[2]
        if not isinstance(value, int) or isinstance(value, bool) or not SIZES.search(name):
            continue
        most = LARGEST_VOCABULARY if "vocab" in name else MOST_LAYERS if name.endswith("layers") else LARGEST_SIZE
        least = 1 if name in REQUIRED else 0
        if not least <= value <= most:
            raise ModelError(f"{where}{key} = {value} must lie in [{least}, {most}]")


def _check_rope(values: Mapping[str, Any], where: str) -> None:
    """Refuse rotary parameters that are no numbers; transformers computes with whatever it finds."""
    for key, value in _leaves(values):
        section, _, name = key.rpartition(".")
        if not re.search(r"(^|\.)rope_(parameters|scaling)(\.|$)", section) or name.endswith("type"):
            continue
        numbers = value if isinstance(value, list) else [value]
        if not all(number is None or isinstance(number, int | float) for number in numbers):
            raise ModelError(f"{where}{key} = {value!r} must be a number")
        if name in ("factor", "rope_theta", "original_max_position_embeddings") and value is not None and value <= 0:
            raise ModelError(f"{where}{key} = {value!r} must be greater than 0")


@contextlib.contextmanager
def explained(values: Mapping[str, Any], where: str) -> Iterator[None]:
    """Turn what transformers raises inside into a `ModelError` that names the key among `values`, if it shows."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = one_line(error)
        if field := VALIDATION.match(text):  # the words of huggingface_hub, around the reason
            text, keys = text[field.end() :], {field[1]}
        else:
            text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
            keys = {key for key, value in _leaves(values) if isinstance(value, str) and repr(value) in text}
        named = [f"{key} = {value!r}: " for key, value in _leaves(values) if key in keys]
        hint = "; set --model.attention eager" if "attention" in text.lower() and "attn" in str(error) else ""
        raise ModelError(f"{where}{''.join(named[:1])}transformers cannot use it ({text}){hint}") from error


def one_line(error: BaseException) -> str:
    """Return the text of `error` as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that from_pretrained takes weights from: one file, or else those of the index.

    Raises `ModelError` where there are none, where the index is damaged, names a file that is absent, or leads out of
    `folder`, and where from_pretrained would add an adapter.
    """
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"{folder / ADAPTER}: from_pretrained adds an adapter to these weights; merge it into them first"
        )
    index = folder / INDEX
    if (folder / SINGLE).exists():
        names = [SINGLE]
    elif index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} is damaged: its weight_map gives no file for each tensor")
        names = sorted(set(weight_map.values()))
    else:
        raise ModelError(
            f"{folder} has no weights ({SINGLE} or {INDEX}); to start from random weights with its {CONFIG}, set "
            "--model.weights random"
        )
    for name in names:
        if problem := outside(folder, name):
            raise ModelError(f"{folder if names == [SINGLE] else index} names {name}, {problem}")
        if not (folder / name).is_file():
            raise ModelError(f"{index} names {name}, which is not there")
    return names


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values below `values` with their keys, joined by dots; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
