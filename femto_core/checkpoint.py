"""The checkpointer seat: what a run consists of, and how it is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from transformers import PretrainedConfig

from femto_core.precision import ParamShare


class Stateful(Protocol):
    """Anything with a state of plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@attrs.frozen(kw_only=True)
class RunState:
    """All parts of a run that a checkpoint holds."""

    shares: Sequence[ParamShare]
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful]
    """States that are equal on all ranks; when resuming under another layout, rank 0's copy is used."""
    rank_parts: Mapping[str, Stateful]
    """States that differ between ranks, such as random generators: loaded only under the layout that saved them."""
    identity: dict[str, Any]
    """Plain values that a resumed run must have in common with this one."""
    plugins: dict[str, str]
    """Active plugins and their versions."""
    config: dict[str, Any]
    """All settings, for the record."""
    model_config: PretrainedConfig
    tokenizer_path: Path


class Checkpointer(Protocol):
    """Keeps a run's checkpoints in one folder. Every method but `close` and `latest` is called by all ranks alike."""

    def save(self, folder: Path, step: int, state: RunState, *, on_failure: Callable[[], None]) -> None:
        """Save `state`, as it is now, as the checkpoint of `step`; the writing itself may go on beside training.

        `on_failure` is called, perhaps in another thread, on a rank that could not write.
        """

    def wait(self) -> None:
        """Return when every save has ended. Raises `UserError` where one failed."""

    def close(self) -> None:
        """Give a save in progress a moment to end, without collectives: the run ends, perhaps on an error."""

    def load(self, path: Path, state: RunState, *, weights_only: bool) -> None:
        """Load `path` into `state`. Raises `UserError` where it does not fit this run, or is damaged."""

    def latest(self, folder: Path) -> Path | None:
        """Return the newest complete checkpoint in `folder`."""


@attrs.frozen
class Counters:
    """Whole numbers that an object keeps in the attributes `names`, as a part of a checkpoint."""

    owner: object
    names: Sequence[str]

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self.owner, name) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.names:
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"{name} = {state[name]!r} must be a whole number from 0")
            setattr(self.owner, name, state[name])


class RandomGenerators:
    """torch's random generators of one rank, as a part of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)


@attrs.frozen
class ExportTensor:
    """A tensor of an export, read only when it is written, so that an export holds one at a time."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Return the values, of `shape`, on the CPU. Called twice, to write and to compare: equal values both times."""
