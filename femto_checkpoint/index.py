"""The index of a checkpoint: which box of which global tensor is in which file (see docs/checkpoints.md)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from femto_checkpoint.files import DTYPES, FileSums, checksum_of, write_json
from femto_core.errors import UserError
from femto_core.layout import Box
from femto_ops.paths import outside

FORMAT = "femto-checkpoint-3"
INDEX = "checkpoint.json"
MASTER = "master"
TORCH_DTYPES = {spelling: dtype for dtype, spelling in DTYPES.items()}


class DamagedError(UserError):
    """A checkpoint whose files differ from what was written."""


@attrs.frozen(kw_only=True)
class SavedBox:
    """A box of a global tensor, saved as the tensor `key` of `file`."""

    file: str
    key: str
    box: Box


@attrs.frozen(kw_only=True)
class SavedTensor:
    """A global tensor: its shape, its dtype in safetensors' spelling, and the saved boxes that make it up."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SavedBox, ...]


@attrs.frozen(kw_only=True)
class Scalar:
    """A number that the optimizer keeps per parameter, not per element."""

    value: float
    dtype: str
    """For a tensor, its dtype in safetensors' spelling; for a plain number int, float or bool."""


@attrs.frozen(kw_only=True)
class Index:
    """The contents of a checkpoint, without the tensors' values."""

    step: int
    layout: str
    """The mesh of the run that saved the checkpoint, as text."""
    identity: dict[str, Any]
    """Properties of data, batches and seed that must be equal in a run that resumes."""
    model: dict[str, Any]
    """The transformers config of the model, as plain values."""
    plugins: dict[str, str]
    """Active plugins and their versions."""
    config: dict[str, Any]
    """All settings of the run."""
    tensors: dict[str, SavedTensor]
    """By FIELD/NAME: `master/NAME` for weights, the optimizer's own field for its state."""
    scalars: dict[str, Scalar]
    """By FIELD/NAME, like `tensors`."""
    files: dict[str, FileSums]
    format: str = FORMAT


class Checkpoint:
    """A complete checkpoint on disk, open for reading."""

    def __init__(self, path: Path) -> None:
        """Read the index. Raises `UserError` if `path` is not a complete checkpoint of this format."""
        self.path = path
        self.index = read_index(path)
        self._open: dict[str, Any] = {}

    @property
    def parameters(self) -> list[str]:
        """The full names of the model's parameters, sorted."""
        return sorted(name.partition("/")[2] for name in self.index.tensors if name.startswith(f"{MASTER}/"))

    def verify(self, files: Iterable[str]) -> None:
        """Compare `files` with their checksums. Raises `DamagedError` for a missing, truncated or changed file."""
        for name in sorted(set(files)):
            wanted, path = self.index.files.get(name), self.path / name
            if wanted is None:
                raise DamagedError(f"{path} is not in the checkpoint's own list of files")
            if problem := outside(self.path, name):
                raise DamagedError(f"{path} is {problem}; put the file itself there")
            try:
                found = checksum_of(path)
            except OSError as error:
                raise DamagedError(f"{path} is missing or cannot be read: {error.strerror}") from None
            if found["bytes"] < wanted["bytes"]:
                raise DamagedError(f"{path} is truncated: {found['bytes']} bytes of {wanted['bytes']}")
            if found != wanted:
                raise DamagedError(f"{path} is damaged: its checksum differs from the saved one")

    def files_for(self, name: str, boxes: Iterable[Box]) -> set[str]:
        """Return the files that hold any part of `boxes` of the tensor `name`.

        Raises `DamagedError` if the saved boxes do not cover `boxes`.
        """
        files = set()
        for box in boxes:
            covered = 0
            for piece in self.index.tensors[name].pieces:
                common = intersect(box, piece.box)
                if common is not None:
                    files.add(piece.file)
                    covered += common.numel
            self._check_covered(name, box, covered)
        return files

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values in `box` of the tensor `name`, assembled from the saved boxes that cover it."""
        saved = self.index.tensors[name]
        common = [(piece, part) for piece in saved.pieces if (part := intersect(box, piece.box)) is not None]
        self._check_covered(name, box, sum(part.numel for _, part in common))
        if len(common) == 1:
            return self._read_piece(*common[0], saved.dtype)
        values = torch.empty(box.sizes, dtype=TORCH_DTYPES[saved.dtype])
        for piece, part in common:
            values[relative(part, box).slices()] = self._read_piece(piece, part, saved.dtype)
        return values

    def whole(self, name: str) -> Box:
        """Return the box that covers the whole tensor `name`."""
        shape = self.index.tensors[name].shape
        return Box((0,) * len(shape), shape)

    def _read_piece(self, piece: SavedBox, common: Box, dtype: str) -> torch.Tensor:
        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.path / piece.file, framework="pt")
            file = self._open[piece.file]
            held = file.get_slice(piece.key)
            if (*held.get_shape(),) != piece.box.sizes or held.get_dtype() != dtype:
                raise DamagedError(
                    f"{self.path / piece.file} is damaged: {piece.key} is {held.get_dtype()} {held.get_shape()}, "
                    f"but {INDEX} says {dtype} {[*piece.box.sizes]}"
                )
            if common == piece.box:  # a tensor without dimensions has no slice
                return file.get_tensor(piece.key)  # type: ignore[no-any-return]
            return held[relative(common, piece.box).slices()]  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise DamagedError(f"{self.path / piece.file} cannot be read: {error}") from None

    def _check_covered(self, name: str, box: Box, covered: int) -> None:
        if covered != box.numel:
            raise DamagedError(f"{self.path}: {name} is incomplete ({covered} of {box.numel} values)")


def read_index(path: Path) -> Index:
    """Return the index of the checkpoint at `path`. Raises `UserError` if it is missing or cannot be read."""
    if problem := outside(path, INDEX):
        raise DamagedError(f"{path / INDEX} is {problem}; put the file itself there")
    try:
        raw = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} is not a complete femto checkpoint: {INDEX}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path / INDEX} is damaged: {error}") from None
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise UserError(f"{path} has format {found!r}; this femto reads {FORMAT!r}")
    if raw.pop("xxh3", None) != _checksum(raw):
        raise DamagedError(f"{path / INDEX} is damaged: its checksum differs from the saved one")
    try:
        index = cattrs.structure(raw, Index)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path / INDEX} is damaged: {type(error).__name__}") from None
    for name, tensor in index.tensors.items():
        if tensor.dtype not in TORCH_DTYPES:
            raise DamagedError(f"{path / INDEX} is damaged: {name} has the unknown dtype {tensor.dtype!r}")
        if not all(_fits(piece.box, tensor.shape) for piece in tensor.pieces):
            raise DamagedError(f"{path / INDEX} is damaged: a piece of {name} lies outside its shape {tensor.shape}")
    return index


def _fits(box: Box, shape: tuple[int, ...]) -> bool:
    same = len(box.offsets) == len(box.sizes) == len(shape)
    return same and all(
        0 <= start <= start + size <= most for start, size, most in zip(box.offsets, box.sizes, shape, strict=True)
    )


def write_index(folder: Path, index: Index) -> None:
    """Write `index` and its checksum to `folder`, as the last file of a checkpoint."""
    raw = json.loads(json.dumps(cattrs.unstructure(index)))
    write_json(folder / INDEX, {**raw, "xxh3": _checksum(raw)})


def _checksum(raw: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(raw, sort_keys=True).encode())


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def relative(box: Box, origin: Box) -> Box:
    """Return `box` with offsets relative to `origin`'s."""
    return Box(tuple(x - y for x, y in zip(box.offsets, origin.offsets, strict=True)), box.sizes)
