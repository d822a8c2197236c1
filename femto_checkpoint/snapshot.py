"""What one rank contributes to a checkpoint: its boxes of the tensors, copied to the CPU at the moment of the call.

A rank's share of a parameter is a vector: what its layout owns, in that order. A master may be longer (a vocabulary
padded for tensor parallelism, a flat shard padded to divide evenly); whatever follows the owned values is filling, is
not saved, and is left as it is on loading.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from femto_checkpoint.files import DTYPES
from femto_checkpoint.index import MASTER, TORCH_DTYPES, Piece, SavedTensor, Scalar
from femto_core.checkpoint import RunState
from femto_core.layout import Box, ParamLayout
from femto_core.mesh import Mesh

PLAIN = {"bool": bool, "int": int, "float": float}


@attrs.frozen(kw_only=True)
class Snapshot:
    """One rank's share: tensors by key, where each lies in its global tensor, and plain numbers."""

    tensors: dict[str, torch.Tensor]
    index: dict[str, SavedTensor]
    scalars: dict[str, Scalar]


def take_snapshot(state: RunState, mesh: Mesh, file: str, *, copy: bool) -> Snapshot:
    """Collect this rank's share; replicas take turns, so that each writes as much. With `copy`, training may go on."""
    snapshot = Snapshot(tensors={}, index={}, scalars={})
    numbers = number_fields(state)
    for group in state.groups:
        layout = group.layout
        replica, count = layout.replica(mesh)
        # Whose turn it is follows from the name: replicas may hold different lists (stages with and without a copy).
        if not layout.primary or zlib.crc32(layout.name.encode()) % count != replica:
            continue
        _add(snapshot, f"{MASTER}/{layout.name}", group.master.detach(), layout, file, copy=copy)
        for key, value in state.optimizer.state.get(group.master, {}).items():
            name = f"{key}/{layout.name}"
            if isinstance(value, torch.Tensor) and value.shape == group.master.shape and key not in numbers:
                _add(snapshot, name, value.detach(), layout, file, copy=copy)
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                snapshot.scalars[name] = Scalar(value=float(value), dtype=DTYPES[value.dtype])
            elif type(value).__name__ in PLAIN:
                snapshot.scalars[name] = Scalar(value=float(value), dtype=type(value).__name__)
            else:
                what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value)}"
                raise TypeError(f"the optimizer keeps {key} of {what} for {layout.name}: no part of it, no number")
    return snapshot


def number_fields(state: RunState) -> set[str]:
    """Return what the optimizer keeps once for a parameter, not for each element: for a scalar both look alike."""
    found = {"step"}  # what torch's optimizers call it, where there are scalars only
    for group in state.groups:
        for key, value in state.optimizer.state.get(group.master, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0 and group.master.dim():
                found.add(key)
    return found


def _add(snapshot: Snapshot, name: str, value: torch.Tensor, layout: ParamLayout, file: str, *, copy: bool) -> None:
    host = value.to("cpu", copy=copy).reshape(-1)
    pieces, start = [], 0
    for number, box in enumerate(layout.owned()):
        key = f"{name}#{number}"
        snapshot.tensors[key] = host[start : start + box.numel].view(box.sizes)
        pieces.append(Piece(file=file, key=key, box=box))
        start += box.numel
    snapshot.index[name] = SavedTensor(shape=layout.global_shape, dtype=DTYPES[value.dtype], pieces=tuple(pieces))


def restore(
    state: RunState,
    read: Callable[[str, Box], torch.Tensor],
    fields: Mapping[str, set[str]],
    scalars: Mapping[str, Scalar],
) -> None:
    """Fill the weights, and for each parameter the optimizer's `fields`, from global tensors and `scalars`.

    A parameter for which the optimizer had kept nothing yet gets no state, and begins like a new one.
    """
    options = {id(p): group for group in state.optimizer.param_groups for p in group["params"]}
    for group in state.groups:
        layout, master = group.layout, group.master
        with torch.no_grad():
            _fill(master, f"{MASTER}/{layout.name}", layout, read)
        if not group.trainable:
            continue
        kept: dict[str, Any] = {}
        for field in sorted(fields.get(layout.name, ())):
            key = f"{field}/{layout.name}"
            if key in scalars:
                kept[field] = _number(scalars[key], master.device, options.get(id(master), {}))
                continue
            dtype = read(key, Box((0,) * len(layout.global_shape), (0,) * len(layout.global_shape))).dtype
            kept[field] = torch.empty_like(master, dtype=dtype, requires_grad=False)  # strides as the master's
            if master.numel() != sum(box.numel for box in layout.owned()):
                kept[field].zero_()
            _fill(kept[field], key, layout, read)
        if kept:
            state.optimizer.state[master] = kept


def _fill(target: torch.Tensor, name: str, layout: ParamLayout, read: Callable[[str, Box], torch.Tensor]) -> None:
    parts = [read(name, box).reshape(-1) for box in layout.owned()]
    if not parts:
        return
    values = parts[0] if len(parts) == 1 else torch.cat(parts)
    if values.numel() == target.numel():
        target.copy_(values.view(target.shape))
        return
    whole = target.reshape(-1).cpu()
    whole[: values.numel()] = values
    target.copy_(whole.view(target.shape))


def _number(saved: Scalar, device: torch.device, options: Mapping[str, Any]) -> Any:
    if saved.dtype in PLAIN:
        return PLAIN[saved.dtype](saved.value)
    # Fused kernels want the count of steps beside the parameter; the others want it on the CPU, and would wait for it.
    beside = options.get("fused") or options.get("capturable")
    return torch.tensor(saved.value, dtype=TORCH_DTYPES[saved.dtype], device=device if beside else "cpu")


def merge(parts: list[dict[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Put the ranks' indices together. Raises `ValueError` where they disagree, leave a gap, or overlap."""
    merged: dict[str, SavedTensor] = {}
    for part in parts:
        for name, saved in part.items():
            before = merged.get(name)
            if before is not None and (before.shape, before.dtype) != (saved.shape, saved.dtype):
                raise ValueError(
                    f"ranks disagree on {name}: {before.shape} {before.dtype}, {saved.shape} {saved.dtype}"
                )
            merged[name] = saved if before is None else attrs.evolve(before, pieces=before.pieces + saved.pieces)
    for name, saved in merged.items():
        found, wanted = sum(piece.box.numel for piece in saved.pieces), math.prod(saved.shape)
        if found != wanted:
            raise ValueError(f"the ranks' layouts of {name} do not make up its shape: {found} values of {wanted}")
    return merged


def merge_scalars(parts: list[dict[str, Scalar]]) -> dict[str, Scalar]:
    """Put the ranks' numbers together. Raises `ValueError` where they disagree."""
    merged: dict[str, Scalar] = {}
    for part in parts:
        for name, saved in part.items():
            if merged.setdefault(name, saved) != saved and not math.isnan(saved.value):
                raise ValueError(f"ranks disagree on {name}: {merged[name].value}, {saved.value}")
    return merged


def plain_copy(value: Any, where: str) -> Any:
    """Copy a part's state, tensors to the CPU. Raises `TypeError` for what could not be loaded without running code."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {plain_copy(key, f"a key of {where}"): plain_copy(v, f"{where}[{key!r}]") for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_copy(item, f"{where}[{number}]") for number, item in enumerate(value))
    raise TypeError(f"{where} is a {type(value).__name__}; a part of a checkpoint is made of plain values and tensors")
