"""Files that are there whole or not at all: streamed safetensors with a checksum, atomic JSON, fsync."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

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
WINDOW = 2**19  # small enough to stay in the cache between the reading and the summing


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
) -> dict[str, int]:
    """Write the CPU tensors that `read` returns, one at a time, as a safetensors file; return its {"bytes", "crc32"}.

    Nothing is held as a whole, and the checksum is of what was meant, not of what the disk gives back.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPES[dtypes[name]], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum, written = 0, 0
    with path.open("wb") as file:
        for block in (struct.pack("<Q", len(text)), text):
            file.write(block)
            checksum, written = zlib.crc32(block, checksum), written + len(block)
        for name in shapes:
            tensor = read(name)
            if not tensor.numel():
                continue
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            for at in range(0, len(raw), CHUNK):
                part: Any = raw[at : at + CHUNK]
                file.write(part)
                checksum, written = zlib.crc32(part, checksum), written + len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": written, "crc32": checksum}


def checksum_of(path: Path) -> dict[str, int]:
    """Return a file's {"bytes", "crc32"} as they are on disk now."""
    checksum, read = 0, 0
    window = memoryview(bytearray(WINDOW))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(window):
            checksum, read = zlib.crc32(window[:size], checksum), read + size
    return {"bytes": read, "crc32": checksum}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; see `write_text`."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write `text` under another name first, so that `path` is complete or absent; its bytes are on disk on return."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sync(path: Path) -> None:
    """Have a file's bytes on disk, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
