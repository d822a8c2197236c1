"""An optimizer that needs whole matrices: each is moved along the polar factor of its gradient (Muon's idea).

Every rank puts its share into the matrix, sums over the axes along which the matrix is sharded or cut, and updates its
share by its part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from femto_core.config import Config
from femto_core.hookspecs import hookimpl
from femto_core.layout import Box, ParamLayout
from femto_core.mesh import Mesh
from femto_core.precision import ParamShare


class Polar(torch.optim.Optimizer):
    """Steps of a fixed size along U V^T for matrices with gradient U S V^T, and along the gradient for vectors."""

    def __init__(self, shares: Sequence[ParamShare], mesh: Mesh, lr: float) -> None:
        super().__init__([share.master for share in shares], {"lr": lr})
        self._shares, self._mesh = list(shares), mesh

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        [group] = self.param_groups
        for share in self._shares:
            if share.master.grad is None:  # it belongs to another call: on every rank that has the parameter
                continue
            change = share.master.grad
            if len(share.layout.global_shape) == 2:
                change = take(share.layout, polar_factor(self._whole(share)), change)
            share.master.sub_(change, alpha=group["lr"])

    def _whole(self, share: ParamShare) -> torch.Tensor:
        """Return the whole gradient matrix [d_out, d_in], from all ranks that have a part of it."""
        layout, grad = share.layout, share.master.grad
        assert grad is not None
        found = torch.zeros(2, *layout.global_shape, dtype=torch.float64)  # values, and how many ranks gave each
        put(layout, found[0], grad)
        put(layout, found[1], torch.ones_like(grad))
        axes = sorted(axis for axis in layout.sharded | layout.cut if self._mesh.size(axis) > 1)
        self._mesh.sum(found, *axes)
        values, counts = found[0], found[1]
        whole: torch.Tensor = values / counts
        return whole


def polar_factor(matrix: torch.Tensor) -> torch.Tensor:
    """Return U V^T of the matrix's singular value decomposition."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    factor: torch.Tensor = u @ vh
    return factor


def owned(layout: ParamLayout) -> list[tuple[Box, int, int]]:
    """Return the boxes that a share owns, with where each lies in the share's vector."""
    boxes, start = [], 0
    for box in layout.owned():
        boxes.append((box, start, start + box.numel))
        start += box.numel
    return boxes


def put(layout: ParamLayout, whole: torch.Tensor, share: torch.Tensor) -> None:
    """Write a share's values to their places."""
    flat = share.reshape(-1)
    for box, start, stop in owned(layout):
        whole[box.slices()] = flat[start:stop].view(box.sizes).to(whole.dtype)


def take(layout: ParamLayout, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the share's part of `whole`, in the shape of `like`; padding gets 0."""
    flat = torch.zeros(like.numel(), dtype=like.dtype)
    for box, start, stop in owned(layout):
        flat[start:stop] = whole[box.slices()].reshape(-1).to(like.dtype)
    return flat.view(like.shape)


class PolarPlugin:
    """The plugin."""

    @hookimpl
    def femto_optimizer(self, config: Config, mesh: Mesh, shares: Sequence[ParamShare]) -> torch.optim.Optimizer:
        return Polar(shares, mesh, config.optim.lr)
