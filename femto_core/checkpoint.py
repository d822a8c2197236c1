"""The checkpoint seat: what a run consists of, and what may be asked of whoever keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from transformers import PretrainedConfig

from femto_core.precision import ParamGroup


class Stateful(Protocol):
    """Anything with a state of plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@attrs.frozen(kw_only=True)
class RunState:
    """What makes up a run."""

    groups: Sequence[ParamGroup]
    optimizer: torch.optim.Optimizer
    parts: Mapping[str, Stateful]
    """Named states that are equal on all ranks, or whose first rank's will do under another layout."""
    rank_parts: Mapping[str, Stateful]
    """Named states of each rank's own, such as random generators: loaded only under the layout that saved them."""
    identity: dict[str, Any]
    """What another run must have in common with this one to go on from it."""
    plugins: dict[str, str]
    """Active plugins and their versions."""
    config: dict[str, Any]
    """All settings, for the record."""
    model_config: PretrainedConfig
    tokenizer_path: Path


class Checkpointer(Protocol):
    """Keeps a run's checkpoints in one folder. Every method but `close` and `latest` is called by all ranks alike."""

    def save(self, folder: Path, step: int, state: RunState) -> None:
        """Save `state`, as it is now, as the checkpoint of `step`; the writing itself may go on beside training."""

    def wait(self) -> None:
        """Return when every save has ended. Raises `UserError` where one failed."""

    def close(self) -> None:
        """Give a save under way a moment to end, asking no other rank: the run ends, perhaps on an error."""

    def load(self, path: Path, state: RunState, *, weights_only: bool) -> None:
        """Load `path` into `state`. Raises `UserError` where it does not fit this run, or is damaged."""

    def latest(self, folder: Path) -> Path | None:
        """Return the newest complete checkpoint in `folder`."""
