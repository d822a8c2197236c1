"""What one rank contributes to a checkpoint: its boxes of the tensors, copied to the CPU at the moment of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from femto_checkpoint.files import DTYPES
from femto_checkpoint.index import Piece, SavedTensor
from femto_core.checkpoint import RunState
from femto_core.layout import Box, ParamLayout
from femto_core.mesh import Mesh
from femto_core.precision import ParamGroup

MASTER = "master"


@attrs.frozen(kw_only=True)
class Snapshot:
    """One rank's share: tensors by key, where each lies in its global tensor, and plain numbers."""

    tensors: dict[str, torch.Tensor]
    index: dict[str, SavedTensor]
    scalars: dict[str, float]


def optimizer_fields(state: RunState, group: ParamGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the optimizer keeps for one parameter, by name."""
    for key, value in state.optimizer.state.get(group.master, {}).items():
        yield key, torch.as_tensor(value)


def take_snapshot(state: RunState, mesh: Mesh, file: str, *, copy: bool) -> Snapshot:
    """Collect this rank's share; replicas take turns, so that each writes as much. With `copy`, training may go on."""
    snapshot = Snapshot(tensors={}, index={}, scalars={})
    for number, group in enumerate(state.groups):
        layout = group.layout
        replica, count = layout.replica(mesh)
        if not layout.primary or number % count != replica:
            continue
        _add(snapshot, f"{MASTER}/{layout.name}", group.master.detach(), layout, file, copy=copy)
        for key, value in optimizer_fields(state, group):
            if value.shape == group.master.shape and value.dim():
                _add(snapshot, f"{key}/{layout.name}", value, layout, file, copy=copy)
            elif value.numel() == 1:
                snapshot.scalars[f"{key}/{layout.name}"] = float(value)
            else:
                raise TypeError(f"the optimizer keeps {key} of shape {tuple(value.shape)} for {layout.name}")
    return snapshot


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
    state: RunState, read: Callable[[str, Box], torch.Tensor], scalars: dict[str, float], names: set[str]
) -> None:
    """Fill `state` from global tensors: weights, and whatever else is kept under `names` for each parameter."""
    for group in state.groups:
        layout, boxes = group.layout, group.layout.owned()

        def whole(field: str, layout: ParamLayout = layout, boxes: list[Box] = boxes) -> torch.Tensor:
            parts = [read(f"{field}/{layout.name}", box).reshape(-1) for box in boxes]
            return torch.cat(parts) if parts else torch.empty(0)

        master = group.master
        with torch.no_grad():
            master.copy_(whole(MASTER).view_as(master))
        fields: dict[str, Any] = {}
        for field in sorted(names - {MASTER}):
            key = f"{field}/{layout.name}"
            if key in scalars:
                # Fused kernels want the count of steps beside the parameter, in fp32.
                fields[field] = torch.tensor(scalars[key], dtype=torch.float32, device=master.device)
            elif group.trainable:
                fields[field] = whole(field).to(master.device).view_as(master)
        if fields and group.trainable:
            state.optimizer.state[master] = fields


def merge(parts: list[dict[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Put the ranks' indices together. Raises `ValueError` where they disagree on a tensor's shape or dtype."""
    merged: dict[str, SavedTensor] = {}
    for part in parts:
        for name, saved in part.items():
            before = merged.get(name)
            if before is not None and (before.shape, before.dtype) != (saved.shape, saved.dtype):
                raise ValueError(
                    f"ranks disagree on {name}: {before.shape} {before.dtype}, {saved.shape} {saved.dtype}"
                )
            merged[name] = saved if before is None else attrs.evolve(before, pieces=before.pieces + saved.pieces)
    return merged
