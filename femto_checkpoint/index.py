"""The index of a checkpoint: which box of which global tensor lies in which file.

A checkpoint is a folder `step-N`: a file of tensors and a file of parts from each rank, `model/` (the transformers
config and the tokenizer), and `checkpoint.json`, written last. Its tensors are boxes of global tensors under full
parameter names: `master/NAME` for the weights, `exp_avg/NAME` and the like for the optimizer. Whoever reads asks for
boxes too, so it does not matter by which layout either side cuts them.

Not torch.distributed.checkpoint: its index is a pickle, which a stranger could have made, and reading one runs code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
from safetensors import safe_open

from femto_checkpoint.files import checksum_of
from femto_core.errors import UserError
from femto_core.layout import Box

FORMAT = "femto-checkpoint-2"
INDEX = "checkpoint.json"


@attrs.frozen(kw_only=True)
class Piece:
    """One box of a global tensor, as the tensor `key` of `file`."""

    file: str
    key: str
    box: Box


@attrs.frozen(kw_only=True)
class SavedTensor:
    """A global tensor: its shape, its dtype in safetensors' spelling, and the pieces that make it up."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@attrs.frozen(kw_only=True)
class Index:
    """Everything there is to know of a checkpoint without opening its tensors."""

    step: int
    layout: str
    """The mesh that saved it."""
    identity: dict[str, Any]
    """What a run must have in common with it to go on from it: data, seed, batch."""
    plugins: dict[str, str]
    config: dict[str, Any]
    tensors: dict[str, SavedTensor]
    scalars: dict[str, float]
    """Numbers the optimizer keeps for each parameter, such as its count of steps."""
    files: dict[str, dict[str, int]]
    """Bytes and CRC-32 of each file."""
    format: str = FORMAT


class Checkpoint:
    """A complete checkpoint on disk, open for reading."""

    def __init__(self, path: Path) -> None:
        """Read the index. Raises `UserError` where `path` is no complete checkpoint of this format."""
        self.path = path
        try:
            raw = json.loads((path / INDEX).read_text(encoding="utf-8"))
            found = raw.get("format") if isinstance(raw, dict) else None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a complete femto checkpoint: {error}") from None
        if found != FORMAT:
            raise UserError(f"{path} has format {found!r}; this femto reads {FORMAT!r}")
        try:
            self.index = cattrs.structure(raw, Index)
        except (cattrs.BaseValidationError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path / INDEX} is damaged: {type(error).__name__}") from None
        self._open: dict[str, Any] = {}

    def verify(self, files: Iterable[str]) -> None:
        """Compare `files` with their checksums. Raises `UserError` naming the one that is missing, short or changed."""
        for name in sorted(set(files)):
            wanted, path = self.index.files.get(name), self.path / name
            if wanted is None:
                raise UserError(f"{path} is not in the checkpoint's own list of files")
            try:
                found = checksum_of(path)
            except OSError as error:
                raise UserError(f"{path} is missing or cannot be read: {error}") from None
            if found["bytes"] != wanted["bytes"]:
                raise UserError(f"{path} is truncated: {found['bytes']} bytes of {wanted['bytes']}")
            if found != wanted:
                raise UserError(f"{path} is damaged: its checksum is not the one it was saved with")

    def files_for(self, name: str, boxes: Iterable[Box]) -> set[str]:
        """Return the files that hold any part of `boxes` of the tensor `name`."""
        pieces = self.index.tensors[name].pieces
        return {piece.file for box in boxes for piece in pieces if intersect(box, piece.box) is not None}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values in `box` of the tensor `name`, put together from the pieces that cover it."""
        values: torch.Tensor | None = None
        covered = 0
        for piece in self.index.tensors[name].pieces:
            common = intersect(box, piece.box)
            if common is None:
                continue
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.path / piece.file, framework="pt")
            part = self._open[piece.file].get_slice(piece.key)[relative(common, piece.box).slices()]
            values = torch.empty(box.sizes, dtype=part.dtype) if values is None else values
            values[relative(common, box).slices()] = part
            covered += common.numel
        if values is None or covered != box.numel:
            raise UserError(f"{self.path}: {name} is not there as a whole ({covered} of {box.numel} values)")
        return values


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box that both have in common; None where they have none."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def relative(box: Box, origin: Box) -> Box:
    """Return `box` as seen from the corner of `origin`."""
    return Box(tuple(x - y for x, y in zip(box.offsets, origin.offsets, strict=True)), box.sizes)
