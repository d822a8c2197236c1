"""A checkpoint's weights as a Hugging Face directory, one tensor in memory at a time, read back and compared."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from femto_checkpoint.compatibility import check_export
from femto_checkpoint.files import WEIGHTS, copy_files, raw_bytes, write_json, write_safetensors
from femto_checkpoint.generation import GENERATION, write_generation
from femto_checkpoint.index import MASTER, Checkpoint
from femto_checkpoint.options import ExportConfig
from femto_checkpoint.writer import MODEL
from femto_core.checkpoint import ExportTensor
from femto_core.errors import UserError
from femto_data.atomic import atomic_path, sync
from femto_ops.conversion import names_as_saved, split_as_saved
from femto_ops.hugging_face import CONFIG, ModelError, read_config, read_json

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARAMETERS_OF_AN_EXPERT = 2
"""How many tensors of experts are in memory at once: names are written in order, and an expert is part of two."""
FOREIGN = ("quantization_config", "auto_map", "transformers_weights")
"""Keys that tell from_pretrained of numbers, code and files that the export does not have."""

Change = Callable[[dict[str, ExportTensor], Mapping[str, ExportTensor], Mapping[str, Any]], None]
"""Edits the tensors to export, by parameter name, in place. Also given: every tensor of the checkpoint, as
`FIELD/NAME` (`master/...` are the weights, `exp_avg/...` an optimizer's state), and the saved run's settings."""


def export(path: Path, config: ExportConfig, change: Change | None = None) -> list[str]:
    """Export the checkpoint at `path` (a step-N folder); return the names of the weight files.

    `change` may replace, merge, add and remove tensors first. The output is complete or absent. Raises `UserError`
    where the checkpoint is damaged, the output is not empty or cannot be written, or the tensors' names are not exactly
    those of the model that config.json describes.
    """
    checkpoint = Checkpoint(path)
    listed = [name for name in checkpoint.index.files if name.startswith(f"{MODEL}/")]
    checkpoint.verify(listed)
    side = [name.removeprefix(f"{MODEL}/") for name in listed if not WEIGHTS.search(name)]
    try:
        model_config = read_config(path / MODEL)
    except ModelError as error:
        raise UserError(f"{path} cannot be exported: {error}") from None
    saved = saved_tensors(checkpoint)
    tensors = {name: saved[f"{MASTER}/{name}"] for name in checkpoint.parameters}
    if change is not None:
        change(tensors, saved, checkpoint.index.config)
    output = Path(config.output).resolve()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{config.output} exists and is not empty; choose another --output")
    if output.is_relative_to(path.resolve()):
        raise UserError(f"{config.output} lies inside the checkpoint {path}; choose another --output")
    try:
        with atomic_path(output) as partial:
            copy_files(path / MODEL, side, partial)  # the transformers config and the tokenizer
            _write_configs(partial, model_config, config.dtype)
            model = check_export(checkpoint, {name: tensor.shape for name, tensor in tensors.items()}, partial)
            files = _write(as_saved(model, tensors), partial, config)
        sync(output.parent)
    except OSError as error:
        raise UserError(f"{config.output} cannot be written: {error}") from None
    return files


def saved_tensors(checkpoint: Checkpoint) -> dict[str, ExportTensor]:
    """Return every tensor of the checkpoint, as `FIELD/NAME`. A file is verified before its first tensor is read."""
    verified: set[str] = set()

    def reader(key: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            box = checkpoint.whole(key)
            files = checkpoint.files_for(key, [box])
            checkpoint.verify(files - verified)
            verified.update(files)
            return checkpoint.read(key, box)

        return read

    return {key: ExportTensor(saved.shape, reader(key)) for key, saved in checkpoint.index.tensors.items()}


def as_saved(model: torch.nn.Module, tensors: Mapping[str, ExportTensor]) -> dict[str, ExportTensor]:
    """Return the parameters as save_pretrained writes them: the experts of a layer as a tensor each."""

    @functools.lru_cache(maxsize=PARAMETERS_OF_AN_EXPERT)
    def split(name: str) -> dict[str, torch.Tensor]:
        return split_as_saved(model, name, tensors[name].read().detach())

    def read(name: str, key: str) -> torch.Tensor:
        return split(name)[key]

    names = names_as_saved(model, {name: tensor.shape for name, tensor in tensors.items()})
    result = {}
    for name, parts in names.items():
        if parts == {name: tensors[name].shape}:
            result[name] = tensors[name]
            continue
        for key, shape in parts.items():
            result[key] = ExportTensor(shape, functools.partial(read, name, key))
    return result


def _write(tensors: Mapping[str, ExportTensor], folder: Path, config: ExportConfig) -> list[str]:
    dtype = EXPORT_DTYPES[config.dtype]
    shapes = {name: tensors[name].shape for name in sorted(tensors)}
    shards = plan_shards(shapes, int(config.shard_gib * 2**30), dtype.itemsize)
    for file, shard in shards.items():
        write_safetensors(
            folder / file,
            {name: shapes[name] for name in shard},
            dict.fromkeys(shard, dtype),
            lambda name: _value(name, tensors[name], dtype),
            {"format": "pt"},
        )
    if len(shards) > 1:
        total = sum(map(math.prod, shapes.values())) * dtype.itemsize
        where = {name: file for file, shard in shards.items() for name in shard}
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    _compare(folder, shards, tensors, dtype)
    return list(shards)


def plan_shards(shapes: Mapping[str, tuple[int, ...]], most_bytes: int, itemsize: int) -> dict[str, list[str]]:
    """Deal the tensors out, in order, to files of at most `most_bytes`; a larger tensor gets a file of its own."""
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


def _value(name: str, tensor: ExportTensor, dtype: torch.dtype) -> torch.Tensor:
    values = tensor.read().detach()
    if tuple(values.shape) != tensor.shape:
        raise ValueError(f"{name} was announced with shape {tensor.shape}, but read() returned {tuple(values.shape)}")
    converted = values.to(dtype)
    if not torch.equal(values.isfinite(), converted.isfinite()):
        raise UserError(f"{name} has values too large for {dtype}; export it as bfloat16 or float32")
    return converted


def _write_configs(folder: Path, config: PretrainedConfig, dtype: str) -> None:
    path = folder / CONFIG
    values = read_json(path)
    values |= {"dtype": dtype, "use_cache": True}  # training disables the cache that generation wants
    for key in FOREIGN:
        values.pop(key, None)
    if not values.get("architectures") and (name := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)):
        values["architectures"] = [name]  # transformers can do without; other programs choose their code by it
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if not (folder / GENERATION).exists():  # a checkpoint of an older femto
        write_generation(folder, config, {})


def _compare(
    folder: Path, shards: Mapping[str, list[str]], tensors: Mapping[str, ExportTensor], dtype: torch.dtype
) -> None:
    """Read the export back and compare it, bit by bit, with a second reading of each tensor."""
    for file, shard in shards.items():
        with safe_open(folder / file, framework="pt") as written:
            for name in shard:
                found, meant = written.get_tensor(name), _value(name, tensors[name], dtype)
                if not torch.equal(raw_bytes(found), raw_bytes(meant)):
                    raise OSError(f"{folder / file}: {name} does not read back as it was written")
