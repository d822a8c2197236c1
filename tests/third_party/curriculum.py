"""A loader whose rows depend on the last step's loss: hard steps are followed by other rows than easy ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from femto_core.batch import Batch
from femto_core.config import Config
from femto_core.data import Collator, Dataset
from femto_core.hookspecs import hookimpl
from femto_core.mesh import Mesh
from femto_core.metrics import StepInfo


class LossDrivenLoader:
    """The rows of a step begin where the digits of the loss before it say."""

    def __init__(self, config: Config, mesh: Mesh, dataset: Dataset, collator: Collator) -> None:
        self._dataset, self._collator, self._data = dataset, collator, config.data
        self._size, self._rank = mesh.size(*mesh.row_axes), mesh.coordinate(*mesh.row_axes)
        self.start = 0

    @property
    def accumulation(self) -> int:
        return self._data.global_batch // self._size // self._data.micro_batch

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"data": self._dataset.fingerprint}

    def next_step(self) -> Sequence[Batch]:
        share = self._data.global_batch // self._size
        first = self.start + self._rank * share
        rows = [self._dataset[(first + i) % len(self._dataset)] for i in range(share)]
        return self._collator(rows).split(self._data.micro_batch)

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["start"]

    def close(self) -> None:
        pass


class Curriculum:
    """The plugin."""

    def __init__(self) -> None:
        self._loader: LossDrivenLoader

    @hookimpl
    def femto_loader(self, config: Config, mesh: Mesh, dataset: Dataset, collator: Collator) -> LossDrivenLoader:
        self._loader = LossDrivenLoader(config, mesh, dataset, collator)
        return self._loader

    @hookimpl
    def femto_step_end(self, info: StepInfo) -> None:
        self._loader.start += int(info.loss * 1e4) % 1000
