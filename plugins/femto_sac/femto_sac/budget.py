"""The policy auto: the least recomputation that fits a budget, from measured costs of a layer.

Layers are alike, so one layer is measured in the first step, on one row of a micro-batch, with each treatment: the
bytes it holds from forward to backward, and the time of its backward. The first step itself recomputes everything.
After it, every rank uses the costs of the most expensive rank, so that all ranks decide alike.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from femto_core.errors import UserError
from femto_ops.memory import counting
from femto_sac.wrapper import ActivationCheckpointWrapper, Treatment

GIB = 2**30


@attrs.frozen
class Cost:
    """Cost of a layer with one treatment, for one row of a micro-batch."""

    held: int
    """Bytes kept from forward to backward, the layer's output included."""
    backward_s: float
    """Seconds of backward, recomputation included."""


@attrs.frozen
class Load:
    """The load of one rank: layers and rows that the budget must hold."""

    layers: int
    rows: int
    """Rows in flight."""
    costs: Mapping[Treatment, Cost]


@attrs.define
class Budget:
    """Decides for all layers of a stage, after the first step."""

    limit_bytes: float
    """Bytes that the stage's layers may hold, over all micro-batches in flight."""
    layers: int = 0
    """Number of layers of the stage."""
    costs: dict[Treatment, Cost] = attrs.field(factory=dict, init=False)
    _order: dict[int, int] = attrs.field(factory=dict, init=False)
    _plan: list[Treatment] = attrs.field(factory=list, init=False)

    def choose(self, wrapper: ActivationCheckpointWrapper, inputs: Any, named: Any) -> Treatment:
        """Return a layer's treatment; measure the first layer that asks."""
        if not self.costs:
            self.costs = {treatment: measure(wrapper, treatment, inputs, named) for treatment in Treatment}
        place = self._order.setdefault(id(wrapper), len(self._order))
        return self._plan[place] if self._plan else Treatment.RECOMPUTE

    def decide(self, loads: Sequence[Load], mine: int) -> None:
        """Fix the plan, given every rank's load. Raises `UserError` on all ranks if one rank's load does not fit."""
        costs = [load.costs for load in loads if load.layers]
        worst = {t: Cost(max(of[t].held for of in costs), max(of[t].backward_s for of in costs)) for t in Treatment}
        plans = [fit(load.layers, worst, self.limit_bytes, load.rows) for load in loads]
        self._plan = plans[mine]


def fit(layers: int, costs: Mapping[Treatment, Cost], limit: float, rows: int) -> list[Treatment]:
    """Return each layer's treatment: the fastest plan that holds at most `limit` bytes.

    Raises `UserError` with the least budget that would do.
    """
    best: tuple[float, int, list[Treatment]] | None = None
    for recomputed, selected in itertools.product(range(layers + 1), repeat=2):
        kept = layers - recomputed - selected
        if kept < 0:
            continue
        counts = {Treatment.RECOMPUTE: recomputed, Treatment.SELECT: selected, Treatment.KEEP: kept}
        held = rows * sum(costs[t].held * n for t, n in counts.items())
        taken = sum(costs[t].backward_s * n for t, n in counts.items())
        if held <= limit and (best is None or (taken, held) < best[:2]):
            best = taken, held, [t for t, n in counts.items() for _ in range(n)]
    if best is None:
        least = rows * layers * min(cost.held for cost in costs.values())
        raise UserError(
            f"sac.budget_gib = {limit / GIB:.3g} is less than full checkpointing holds: the layers of one rank need at "
            f"least {least / GIB:.3g} GiB"
        )
    return best[2]


def measure(wrapper: ActivationCheckpointWrapper, treatment: Treatment, inputs: Any, named: Any) -> Cost:
    """Run a layer forward and backward on the first row, a few times; return the bytes it held and its best time."""
    held, least = 0, math.inf
    device = next(wrapper.parameters()).device
    cuda = [device] if device.type == "cuda" else []
    for _ in range(4):  # the first warms up, and others may share the machine
        one, one_named = first_row(inputs), first_row(named)
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), counting(device) as counter:
            before = counter.live()
            output = wrapper.run(treatment, one, one_named)
            output = output[0] if isinstance(output, tuple) else output
            held = counter.live() - before
        if cuda:
            torch.cuda.synchronize(device)  # so that forward's kernels are not counted
        started = time.perf_counter()
        sources = [t for t in [*one, *one_named.values()] if isinstance(t, torch.Tensor) and t.requires_grad]
        sources += [p for p in wrapper.parameters() if p.requires_grad][:1]  # the inputs may want none
        torch.autograd.grad(output, sources, torch.zeros_like(output), allow_unused=True)
        if cuda:
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - started)
    return Cost(held, least)


def first_row(values: Any) -> Any:
    """Return nested inputs with the first row of every tensor, detached from the graph."""
    if isinstance(values, torch.Tensor):
        row = values[:1].detach().clone() if values.dim() else values
        return row.requires_grad_() if values.requires_grad else row
    if isinstance(values, dict):
        return {key: first_row(value) for key, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(first_row(value) for value in values)
    return values
