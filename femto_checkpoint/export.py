"""A checkpoint's weights as a Hugging Face directory, one tensor in memory at a time, read back and compared."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from safetensors import safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from femto_checkpoint.files import copy_folder, sync, write_json, write_safetensors
from femto_checkpoint.index import MASTER, Checkpoint
from femto_checkpoint.writer import MODEL
from femto_core.errors import UserError
from femto_core.sections import positive

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL = ("bos", "eos", "pad")


@attrs.frozen(kw_only=True)
class ExportConfig:
    """Write a checkpoint's weights as a Hugging Face directory that `from_pretrained` loads."""

    output: str
    """Directory to write; must not exist, or be empty."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Element type of the weights."""
    shard_gib: float = attrs.field(default=5.0, validator=positive)
    """Largest size of one file."""


def export(path: Path, config: ExportConfig) -> list[str]:
    """Export the checkpoint at `path` (a step-N folder); return the names of the weight files.

    Raises `UserError` where the checkpoint is damaged, the output is not empty, or it cannot be written. The output
    appears whole or not at all.
    """
    checkpoint = Checkpoint(path)
    keys = [f"{MASTER}/{name}" for name in checkpoint.parameters]
    files = {file for key in keys for file in checkpoint.files_for(key, [checkpoint.whole(key)])}
    checkpoint.verify([*files, *(name for name in checkpoint.index.files if name.startswith(f"{MODEL}/"))])
    output = Path(config.output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{config.output} exists and is not empty; choose another --output")
    if output.is_relative_to(path.resolve()):
        raise UserError(f"{config.output} lies inside the checkpoint {path}; choose another --output")
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shards = _write(checkpoint, partial, config)
        if output.exists():
            output.rmdir()
        partial.rename(output)
        sync(output.parent)
    except OSError as error:
        raise UserError(f"{config.output} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return list(shards)


def _write(checkpoint: Checkpoint, folder: Path, config: ExportConfig) -> dict[str, list[str]]:
    copy_folder(checkpoint.path / MODEL, folder)  # the transformers config and the tokenizer
    dtype = EXPORT_DTYPES[config.dtype]
    shapes = {name: checkpoint.index.tensors[f"{MASTER}/{name}"].shape for name in checkpoint.parameters}
    shards = plan_shards(shapes, int(config.shard_gib * 2**30), dtype.itemsize)
    for file, shard in shards.items():
        write_safetensors(
            folder / file,
            {name: shapes[name] for name in shard},
            dict.fromkeys(shard, dtype),
            lambda name: _value(checkpoint, name, dtype),
            {"format": "pt"},
        )
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        where = {name: file for file, shard in shards.items() for name in shard}
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    _write_configs(folder, config.dtype)
    _compare(folder, shards, checkpoint, dtype)
    for path in [*folder.rglob("*"), folder]:
        sync(path)
    return shards


def plan_shards(shapes: dict[str, tuple[int, ...]], most_bytes: int, itemsize: int) -> dict[str, list[str]]:
    """Deal the tensors out to files of at most `most_bytes` (or one tensor), in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        more = math.prod(shape) * itemsize
        if groups[-1] and size + more > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += more
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, start=1)}


def _value(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    key = f"{MASTER}/{name}"
    values = checkpoint.read(key, checkpoint.whole(key))
    converted = values.to(dtype)
    if not torch.equal(values.isfinite(), converted.isfinite()):
        raise UserError(f"{name} has values too large for {dtype}; export it as bfloat16 or float32")
    return converted


def _write_configs(folder: Path, dtype: str) -> None:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config |= {"dtype": dtype, "use_cache": True}  # training keeps no cache, whoever generates wants one
    if not config.get("architectures") and (name := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])):
        config["architectures"] = [name]  # transformers can do without; other programs choose their code by it
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokens: dict[str, Any] = _special_tokens(folder)
    tokens |= {key: config[key] for kind in SPECIAL if config.get(key := f"{kind}_token_id") is not None}
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n", encoding="utf-8")


def _special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the special tokens that the tokenizer's own files name: where generation stops, above all."""
    try:
        names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    found = {}
    for kind in SPECIAL:
        name = names.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if name in ids:
            found[f"{kind}_token_id"] = ids[name]
    return found


def _compare(folder: Path, shards: dict[str, list[str]], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Read the export back; every value must be the checkpoint's."""
    for file, shard in shards.items():
        with safe_open(folder / file, framework="pt") as written:
            for name in shard:
                found, meant = written.get_tensor(name), _value(checkpoint, name, dtype)
                if not torch.equal(_raw(found), _raw(meant)):
                    raise OSError(f"{folder / file}: {name} does not read back as it was written")


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # bytes: NaN is not equal to itself
