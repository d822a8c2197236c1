"""Deferred weight gradients: backward computes input gradients only, and the weights' gradients follow later.

These are passes B and W of zero-bubble pipelines (Qi et al. 2023, arXiv:2401.10241). A layer that supports it asks its
stage's `WeightGradients` in backward; layers that never ask compute both gradients at once, which is equally correct.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Compute = Callable[[], Sequence[torch.Tensor | None]]


class DeferredGradients:
    """The gradient computations that one backward deferred."""

    def __init__(self) -> None:
        self._tasks: list[tuple[list[GradientEdge | None], Compute]] = []

    def add(self, edges: list[GradientEdge | None], compute: Compute) -> None:
        """Add `compute`, which returns the gradient for each of `edges`."""
        self._tasks.append((edges, compute))

    def compute(self) -> None:
        """Run the deferred computations and feed the results through autograd; `.grad` and hooks see them as usual."""
        tasks, self._tasks = self._tasks, []
        while tasks:
            edges, compute = tasks.pop(0)
            pairs = zip(edges, compute(), strict=True)
            found = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
            if found:
                torch.autograd.backward([edge for edge, _ in found], [grad for _, grad in found])


class WeightGradients:
    """Tells a stage's layers whether to defer their weights' gradients, and collects what they defer."""

    def __init__(self) -> None:
        self._deferred: DeferredGradients | None = None

    @property
    def deferring(self) -> bool:
        """Whether weight gradients are to be deferred now."""
        return self._deferred is not None

    @contextlib.contextmanager
    def defer(self) -> Iterator[DeferredGradients]:
        """Within the context, every backward adds its weight gradients to the yielded object, uncomputed."""
        self._deferred = DeferredGradients()
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def compute_or_defer(self, edges: list[GradientEdge | None], compute: Compute) -> Sequence[torch.Tensor | None]:
        """Return `compute()`, the gradients for `edges`; if deferring, return None for each and call it later."""
        if self._deferred is None:
            return compute()
        self._deferred.add(edges, compute)
        return [None] * len(edges)


def edges_of(tensors: Sequence[torch.Tensor | None]) -> list[GradientEdge | None]:
    """Return the gradient edge of each tensor, None for a tensor without gradient. For use in an autograd forward."""
    return [get_gradient_edge(t) if t is not None and t.requires_grad else None for t in tensors]
