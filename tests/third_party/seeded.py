"""Values for parameters that a plugin adds to a model: random, by the seed and the parameter's name alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import attrs
import torch

from femto_core.layout import Box
from femto_core.weights import WeightSource


@attrs.frozen
class SeededWeights:
    """A weight source with the `added` parameters, beside those of another source."""

    inner: WeightSource
    added: Mapping[str, tuple[int, ...]]
    """The shape of each parameter by its name."""
    seed: int
    scale: float = 0.1

    def read(self, name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        if name not in self.added:
            return self.inner.read(name, boxes)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        whole = self.scale * torch.randn(self.added[name], generator=generator)
        return [whole[box.slices()] for box in boxes]
