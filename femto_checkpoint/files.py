"""Checkpoint files: safetensors streamed with a checksum, atomic JSON, copies of folders."""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
import xxhash

from femto_core.errors import UserError
from femto_data.atomic import write_atomic
from femto_ops.paths import outside

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK = 16 * 2**20
WEIGHTS = re.compile(r"\.(safetensors|bin|gguf|pth?)$|\.index\.json$|^adapter_")


class FileSums(TypedDict):
    """Size and checksum of a file as it was written."""

    bytes: int
    xxh3: str
    """The file's 64-bit XXH3, in hexadecimal. XXH3 is faster than memory, so verifying costs no more than reading."""


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> FileSums:
    """Write a safetensors file, one tensor at a time; return its size and checksum. Its bytes are on disk on return.

    `read` returns the CPU tensor of a name, of the given shape and dtype. The checksum is computed from memory, not
    from the disk, so that it also detects a faulty write.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPES[dtypes[name]], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum, written = xxhash.xxh3_64(), 0
    with path.open("wb") as file:
        for block in (struct.pack("<Q", len(text)), text):
            file.write(block)
            checksum.update(block)
            written += len(block)
        for name in shapes:
            tensor = read(name)
            if not tensor.numel():
                continue
            raw = raw_bytes(tensor).numpy()
            for at in range(0, len(raw), CHUNK):
                part: Any = raw[at : at + CHUNK]
                file.write(part)
                checksum.update(part)
                written += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": written, "xxh3": checksum.hexdigest()}


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values: two are equal bit by bit, NaN too."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def checksum_of(path: Path) -> FileSums:
    """Return the size and checksum of a file on disk."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:  # an empty file cannot be mapped
            return {"bytes": 0, "xxh3": xxhash.xxh3_64_hexdigest(b"")}
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:  # twice as fast as reading
            return {"bytes": size, "xxh3": xxhash.xxh3_64_hexdigest(mapped)}


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON, complete or not at all; its bytes are on disk on return."""
    write_atomic(path, json.dumps(value))


def side_files(folder: Path) -> list[str]:
    """Return the names of the files below `folder`, without weights, which from_pretrained would take for its own."""
    found = (path for path in folder.rglob("*") if not path.is_dir() and not WEIGHTS.search(path.name))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files below `source` to `target`, but not their modes: copies of read-only files must be writable.

    Raises `UserError` for a file that lies outside `source`, by its name or by a link.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if problem := outside(source, name):
            raise UserError(f"{source / name} is {problem}; put the file itself there")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
