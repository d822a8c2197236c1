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

from femto_checkpoint.files import write_json, write_safetensors
from femto_checkpoint.index import Checkpoint
from femto_checkpoint.snapshot import MASTER
from femto_core.errors import UserError
from femto_core.layout import Box
from femto_core.sections import positive

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    """Export the checkpoint at `path` (a step-N folder, or a run's folder, whose newest is taken); return the files.

    Raises `UserError` where the checkpoint is damaged or the output is not empty. The output appears whole or not at all.
    """
    checkpoint = Checkpoint(path)
    names = sorted(name for name in checkpoint.index.tensors if name.startswith(f"{MASTER}/"))
    checkpoint.verify(file for name in names for file in checkpoint.files_for(name, [_whole(checkpoint, name)]))
    output = Path(config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not empty; choose another --output")
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(path / "model", partial)  # the transformers config and the tokenizer
    dtype = TORCH_DTYPES[config.dtype]
    shapes = {name.partition("/")[2]: checkpoint.index.tensors[name].shape for name in names}
    shards = _plan(shapes, int(config.shard_gib * 2**30), dtype.itemsize)
    for file, shard in shards.items():
        write_safetensors(
            partial / file,
            {name: shapes[name] for name in shard},
            dict.fromkeys(shard, dtype),
            lambda name: _value(checkpoint, name, dtype),
            {"format": "pt"},
        )
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        where = {name: file for file, shard in shards.items() for name in shard}
        write_json(partial / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    _write_configs(partial, config.dtype)
    _compare(partial, shards, checkpoint, dtype)
    if output.exists():
        output.rmdir()
    partial.rename(output)
    return list(shards)


def _plan(shapes: dict[str, tuple[int, ...]], most_bytes: int, itemsize: int) -> dict[str, list[str]]:
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
    return checkpoint.read(key, _whole(checkpoint, key)).to(dtype)


def _whole(checkpoint: Checkpoint, key: str) -> Box:
    shape = checkpoint.index.tensors[key].shape
    return Box((0,) * len(shape), shape)


def _write_configs(folder: Path, dtype: str) -> None:
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config |= {"dtype": dtype, "use_cache": True}  # training keeps no cache, whoever generates wants one
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    special = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
    }
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")


def _compare(folder: Path, shards: dict[str, list[str]], checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """Read the export back; every value must be the checkpoint's."""
    for file, shard in shards.items():
        with safe_open(folder / file, framework="pt") as written:
            for name in shard:
                if not torch.equal(written.get_tensor(name), _value(checkpoint, name, dtype)):
                    raise OSError(f"{folder / file}: {name} does not read back as it was written")
