"""Which layers each stage has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from femto_core.errors import UserError


def even_layers(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has: equally many, the first ones one more where it does not divide."""
    base, extra = divmod(layers, stages)
    return [base + (stage < extra) for stage in range(stages)]


def balanced_layers(layers: int, stages: int, first: float, last: float) -> list[int]:
    """Return how many layers each stage has so that the slowest is as fast as can be, with at least one in each.

    `first` and `last` are what embedding and head cost, in layers.
    """
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    # best[k][n]: the least possible cost of the slowest of the first k stages when they have n layers.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        for before, (cost, _) in best[-1].items():
            for count in range(1, layers - before + 1):
                found = (max(cost, count + extra[stage]), count)
                if before + count not in row or found < row[before + count]:
                    row[before + count] = found
        best.append(row)
    counts: list[int] = []
    left = layers
    for row in reversed(best[1:]):
        counts.append(row[left][1])
        left -= counts[-1]
    return counts[::-1]


def head_cost(config: Any) -> float:
    """Return what the head costs, in layers: by the products of a token with their matrices."""
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    attention = width * head_dim * (2 * heads + 2 * config.num_key_value_heads)
    return float(width * config.vocab_size / (attention + 3 * width * config.intermediate_size))


def divide(config: Any, stages: int, layers: str) -> list[range]:
    """Return each stage's layers; `layers` is even, balanced, or numbers such as 3,3,2.

    Raises `UserError` for numbers that do not add up, and for more stages than layers.
    """
    count = config.num_hidden_layers
    if layers in ("even", "balanced"):
        if stages > count:
            raise UserError(
                f"{count} layers cannot be divided into {stages} pipeline stages, at least one in each; use fewer "
                "stages, or say with pp.layers (0,4,4,0) that one has the embedding or the head alone"
            )
        counts = (
            even_layers(count, stages) if layers == "even" else balanced_layers(count, stages, 0.0, head_cost(config))
        )
    else:
        counts = parse_layers(layers)
        if len(counts) != stages or sum(counts) != count:
            raise UserError(
                f"pp.layers = {layers!r} must be {stages} numbers, one for each stage, that add up to {count} layers"
            )
        if any(number == 0 for number in counts[1:-1]):
            raise UserError(f"pp.layers = {layers!r}: only the first and the last stage may have no layers")
    ends = list(itertools.accumulate(counts, initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def parse_layers(text: str) -> list[int]:
    """Return the numbers in `text`. Raises `UserError` where it is something else."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"pp.layers = {text!r} must be even, balanced, or numbers such as 3,3,2") from None
    if min(counts) < 0:
        raise UserError(f"pp.layers = {text!r}: a stage cannot have fewer than no layers")
    return counts


def describe(ranges: Sequence[range]) -> str:
    """Return ranges in words: 0-3, 4-7, none."""
    return ", ".join(f"{r.start}-{r.stop - 1}" if len(r) else "none" for r in ranges)
