"""One rank's share of a checkpoint: the boxes it owns of weights and optimizer state, copied to the CPU.

A rank's share of a parameter is a vector: the values of the boxes that the parameter's layout owns, in that order. A
master may be padded (a vocabulary padded for tensor parallelism, a flat shard padded to divide evenly): its first
elements are the owned values. The padding is neither saved nor loaded.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from femto_checkpoint.files import DTYPES, raw_bytes
from femto_checkpoint.index import MASTER, TORCH_DTYPES, SavedBox, SavedTensor, Scalar
from femto_core.checkpoint import RunState
from femto_core.layout import Box, ParamLayout
from femto_core.mesh import Mesh

PLAIN = {"bool": bool, "int": int, "float": float}


@attrs.frozen(kw_only=True)
class Snapshot:
    """One rank's share: tensors by key, the index of their boxes in global tensors, and numbers per parameter."""

    tensors: dict[str, torch.Tensor]
    index: dict[str, SavedTensor]
    scalars: dict[str, Scalar]


def take_snapshot(state: RunState, mesh: Mesh, file: str, *, copy: bool) -> Snapshot:
    """Return this rank's share; its tensors are saved as the contents of `file`.

    Of the ranks that hold replicas of a parameter one saves it, chosen so that all write about as much. With `copy`,
    the snapshot shares no memory with the run, so training may continue while it is written.
    """
    snapshot = Snapshot(tensors={}, index={}, scalars={})
    numbers = number_fields(state)
    for share in state.shares:
        layout = share.layout
        replica, count = layout.replica(mesh)
        # The name decides which replica saves, since ranks may hold different lists of parameters (tied weights in pp).
        if not layout.primary or zlib.crc32(layout.name.encode()) % count != replica:
            continue
        _add(snapshot, f"{MASTER}/{layout.name}", share.master.detach(), layout, file, copy=copy)
        for key, value in state.optimizer.state.get(share.master, {}).items():
            name = f"{key}/{layout.name}"
            if isinstance(value, torch.Tensor) and value.shape == share.master.shape and key not in numbers:
                _add(snapshot, name, value.detach(), layout, file, copy=copy)
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                snapshot.scalars[name] = Scalar(value=float(value), dtype=DTYPES[value.dtype])
            elif type(value).__name__ in PLAIN:
                snapshot.scalars[name] = Scalar(value=float(value), dtype=type(value).__name__)
            else:
                what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value)}"
                raise TypeError(
                    f"the optimizer keeps {key} of {what} for {layout.name}; only its shape and single "
                    "numbers can be saved"
                )
    return snapshot


def number_fields(state: RunState) -> set[str]:
    """Return the fields of per-parameter, not per-element, optimizer state.

    A scalar parameter's own state has the same shape for both, so the other parameters decide.
    """
    found = {"step"}  # torch's name for it, in case all parameters are scalars
    for share in state.shares:
        for key, value in state.optimizer.state.get(share.master, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0 and share.master.dim():
                found.add(key)
    return found


def _add(snapshot: Snapshot, name: str, value: torch.Tensor, layout: ParamLayout, file: str, *, copy: bool) -> None:
    host = value.to("cpu", copy=copy).reshape(-1)
    pieces, start = [], 0
    for number, box in enumerate(layout.owned()):
        key = f"{name}#{number}"
        snapshot.tensors[key] = host[start : start + box.numel].view(box.sizes)
        pieces.append(SavedBox(file=file, key=key, box=box))
        start += box.numel
    snapshot.index[name] = SavedTensor(shape=layout.global_shape, dtype=DTYPES[value.dtype], pieces=tuple(pieces))


def restore(
    state: RunState,
    read: Callable[[str, Box], torch.Tensor],
    fields: Mapping[str, set[str]],
    scalars: Mapping[str, Scalar],
) -> None:
    """Load the weights and, for each trainable parameter, the optimizer's `fields` of that name.

    `read` returns the values in a box of a global tensor. A parameter without saved fields gets no optimizer state,
    like a parameter before its first step.
    """
    options = {id(p): group for group in state.optimizer.param_groups for p in group["params"]}
    for share in state.shares:
        layout, master = share.layout, share.master
        with torch.no_grad():
            _fill(master, f"{MASTER}/{layout.name}", layout, read)
        if not (share.trainable and share.master.numel()):
            continue
        kept: dict[str, Any] = {}
        for field in sorted(fields.get(layout.name, ())):
            key = f"{field}/{layout.name}"
            if key in scalars:
                kept[field] = _number(scalars[key], master.device, options.get(id(master), {}))
                continue
            dtype = read(key, Box((0,) * len(layout.global_shape), (0,) * len(layout.global_shape))).dtype
            kept[field] = torch.empty_like(master, dtype=dtype, requires_grad=False)  # with the master's strides
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
    # Fused kernels need the step count on the parameter's device; the others need it on the CPU, to avoid a sync.
    beside = options.get("fused") or options.get("capturable")
    return torch.tensor(saved.value, dtype=TORCH_DTYPES[saved.dtype], device=device if beside else "cpu")


def merge(parts: list[dict[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Return the union of the ranks' indices. Raises `ValueError` if they disagree, leave a gap, or overlap."""
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
            raise ValueError(f"the ranks' layouts of {name} do not add up to its shape: {found} values of {wanted}")
    return merged


def merge_scalars(parts: list[dict[str, Scalar]]) -> dict[str, Scalar]:
    """Return the union of the ranks' numbers. Raises `ValueError` if they disagree."""
    merged: dict[str, Scalar] = {}
    for part in parts:
        for name, saved in part.items():
            if merged.setdefault(name, saved) != saved and not math.isnan(saved.value):
                raise ValueError(f"ranks disagree on {name}: {merged[name].value}, {saved.value}")
    return merged


def plain_copy(value: Any, where: str) -> Any:
    """Return a copy of a part's state with its tensors on the CPU.

    Raises `TypeError` for a value that `torch.load(weights_only=True)` would refuse.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {plain_copy(key, f"a key of {where}"): plain_copy(v, f"{where}[{key!r}]") for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_copy(item, f"{where}[{number}]") for number, item in enumerate(value))
    raise TypeError(
        f"{where} is a {type(value).__name__}; a part of a checkpoint may hold plain values and tensors only"
    )


def equal_states(a: Any, b: Any) -> bool:
    """Return whether two states of a part, of plain values and tensors, are equal; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a).equal(raw_bytes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return bool(a == b) or (a != a and b != b)
