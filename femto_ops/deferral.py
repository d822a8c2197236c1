"""Weight gradients put off: a backward that others wait for computes input gradients alone, and weights' come later.

(Qi et al. 2023, arXiv:2401.10241: B and W.) A layer that can do so asks its stage's `WeightGradients` in its backward;
layers that never ask compute everything at once, which is as right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Compute = Callable[[], Sequence[torch.Tensor | None]]


class Later:
    """Gradients that one backward has put off."""

    def __init__(self) -> None:
        self._tasks: list[tuple[list[GradientEdge | None], Compute]] = []

    def add(self, edges: list[GradientEdge | None], compute: Compute) -> None:
        """Put off `compute`, whose results belong to `edges`."""
        self._tasks.append((edges, compute))

    def compute(self) -> None:
        """Compute what was put off, and let it flow on as backward would have: into `grad`, past every hook."""
        tasks, self._tasks = self._tasks, []
        while tasks:
            edges, compute = tasks.pop(0)
            pairs = zip(edges, compute(), strict=True)
            found = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
            if found:
                torch.autograd.backward([edge for edge, _ in found], [grad for _, grad in found])


class WeightGradients:
    """Where a stage's layers ask whether to put off their weights' gradients."""

    def __init__(self) -> None:
        self._later: Later | None = None

    @property
    def are_put_off(self) -> bool:
        """Whether a backward under way is to put them off."""
        return self._later is not None

    @contextlib.contextmanager
    def put_off(self) -> Iterator[Later]:
        """Inside, backward collects weight gradients in the result instead of computing them."""
        self._later = Later()
        try:
            yield self._later
        finally:
            self._later = None

    def now_or_later(self, edges: list[GradientEdge | None], compute: Compute) -> Sequence[torch.Tensor | None]:
        """Return the gradients that belong to `edges`; None for each where they come later."""
        if self._later is None:
            return compute()
        self._later.add(edges, compute)
        return [None] * len(edges)


def edges_of(tensors: Sequence[torch.Tensor | None]) -> list[GradientEdge | None]:
    """Return where the gradient of each tensor goes; None for those that need none. For use in a forward."""
    return [get_gradient_edge(t) if t is not None and t.requires_grad else None for t in tensors]
