"""Saving and loading a run, on one layout: every rank writes the masters and the optimizer state it owns.

A checkpoint is a folder `step-N`. It is written under another name and renamed when every rank has finished, so that a
folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from femto_core.errors import UserError
from femto_core.mesh import Mesh
from femto_core.precision import ParamGroup

FORMAT = "femto-checkpoint-1"


class Stateful(Protocol):
    """Anything with a state of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@attrs.frozen(kw_only=True)
class RunState:
    """What makes up a run: the parameters, the optimizer, and named parts (loader, counters, plugins' own)."""

    groups: Sequence[ParamGroup]
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful]


class Checkpointer(Protocol):
    """Keeps a run's checkpoints in one folder."""

    def save(self, folder: Path, step: int, state: RunState) -> None:
        """Save `state` as the checkpoint of `step`; called by every rank, complete on every rank on return."""

    def load(self, path: Path, state: RunState) -> None:
        """Load `path` into `state`. Raises `UserError` where it does not fit this run, or is damaged."""

    def latest(self, folder: Path) -> Path | None:
        """Return the newest complete checkpoint in `folder`."""


class RankFiles:
    """One safetensors file of tensors and one of parts for each rank; loads on the layout that saved it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def save(self, folder: Path, step: int, state: RunState) -> None:
        partial, final = folder / f".partial-step-{step}", folder / f"step-{step}"
        if self._mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._mesh.barrier()
        tensors, parts = self._files(partial)
        save_file(self._tensors(state), tensors, metadata={"format": FORMAT})
        torch.save({name: part.state_dict() for name, part in state.parts.items()}, parts)
        for file in (tensors, parts):
            _sync_to_disk(file)
        self._mesh.barrier()
        if self._mesh.rank == 0:
            meta = {"format": FORMAT, "step": step, "layout": str(self._mesh)}
            (partial / "checkpoint.json").write_text(json.dumps(meta))
            _sync_to_disk(partial / "checkpoint.json")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync_to_disk(folder)
        self._mesh.barrier()

    def load(self, path: Path, state: RunState) -> None:
        try:
            meta = json.loads((path / "checkpoint.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is not a complete femto checkpoint: {error}") from None
        if meta.get("format") != FORMAT:
            raise UserError(f"{path} has format {meta.get('format')!r}; this femto reads {FORMAT!r}")
        if meta["layout"] != str(self._mesh):
            raise UserError(f"{path} was saved on {meta['layout']}, this run is laid out as {self._mesh}")
        tensors, parts = self._files(path)
        try:
            saved = load_file(tensors)
            named = torch.load(parts, weights_only=True)
        except (SafetensorError, OSError, RuntimeError, EOFError) as error:
            raise UserError(f"a file of {path} is missing or damaged: {error}") from None
        self._take(path, saved, state)
        for name, part in state.parts.items():
            if name not in named:
                raise UserError(f"{path} has no part {name!r}: it was saved without the plugin that keeps it")
            part.load_state_dict(named[name])

    def latest(self, folder: Path) -> Path | None:
        found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
        complete = [(step, p) for step, p in found if (p / "checkpoint.json").is_file()]
        return max(complete)[1] if complete else None

    def _files(self, folder: Path) -> tuple[Path, Path]:
        return folder / f"rank-{self._mesh.rank:05}.safetensors", folder / f"rank-{self._mesh.rank:05}.pt"

    @staticmethod
    def _tensors(state: RunState) -> dict[str, torch.Tensor]:
        tensors = {f"master/{g.name}": g.master.detach().contiguous() for g in state.groups}
        for group in state.groups:
            for key, value in state.optimizer.state.get(group.master, {}).items():
                tensors[f"optimizer/{key}/{group.name}"] = torch.as_tensor(value).contiguous()
        return tensors

    @staticmethod
    def _take(path: Path, saved: dict[str, torch.Tensor], state: RunState) -> None:
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in saved.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                field, _, name = rest.partition("/")
                by_name.setdefault(name, {})[field] = value
        for group in state.groups:
            value = saved.get(f"master/{group.name}", torch.empty(0))
            if value.shape != group.master.shape:
                raise UserError(
                    f"{path}: {group.name} has shape {tuple(value.shape)}, this run's has {tuple(group.master.shape)}"
                )
            group.master.data.copy_(value)
            if group.name in by_name:
                device = group.master.device
                # AdamW's step count stays where fused kernels want it: beside the parameter.
                state.optimizer.state[group.master] = {k: v.to(device) for k, v in by_name[group.name].items()}


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
