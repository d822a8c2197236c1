"""The partition of the model's layers into chunks, in the order of the virtual stages."""

from __future__ import annotations

import itertools
from typing import Any

from femto_core.errors import UserError
from femto_ops.flops import layer_products


def even_layers(layers: int, chunks: int) -> list[int]:
    """Return how many layers each chunk has: equally many, or one more in the first chunks if there is a remainder."""
    base, extra = divmod(layers, chunks)
    return [base + (chunk < extra) for chunk in range(chunks)]


def balanced_layers(layers: int, chunks: int, first: float, last: float) -> list[int]:
    """Return how many layers each chunk has, at least one, so that the slowest chunk is as fast as possible.

    `first` and `last` are the costs of embedding and head, in layers.
    """
    extra = [0.0] * chunks
    extra[0] += first
    extra[-1] += last
    # best[k][n]: the least cost of the slowest of the first k chunks if they have n layers, and the last one's count.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for chunk in range(chunks):
        row: dict[int, tuple[float, int]] = {}
        for before, (cost, _) in best[-1].items():
            for count in range(1, layers - before + 1):
                found = (max(cost, count + extra[chunk]), count)
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
    """Return the cost of the head in layers: the ratio of the products of one token with their matrices."""
    return config.hidden_size * config.vocab_size / layer_products(config)  # type: ignore[no-any-return]


def divide(config: Any, chunks: int, layers: str) -> list[range]:
    """Return the layers of each virtual stage; `layers` is even, balanced, or numbers such as 3,3,2.

    Raises `UserError` for numbers that do not add up, and for more chunks than layers.
    """
    count = config.num_hidden_layers
    if layers in ("even", "balanced"):
        if chunks > count:
            raise UserError(
                f"{count} layers cannot be divided into {chunks} pipeline chunks of at least one layer; use fewer "
                "ranks or chunks, or let pp.layers (0,4,4,0) give embedding or head a chunk without layers"
            )
        counts = (
            even_layers(count, chunks) if layers == "even" else balanced_layers(count, chunks, 0.0, head_cost(config))
        )
    else:
        counts = parse_layers(layers)
        if len(counts) != chunks or sum(counts) != count:
            raise UserError(
                f"pp.layers = {layers!r} must be {chunks} numbers, one for each chunk, that add up to {count} layers"
            )
        if any(number == 0 for number in counts[1:-1]):
            raise UserError(f"pp.layers = {layers!r}: only the first and the last chunk may have no layers")
    ends = list(itertools.accumulate(counts, initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def parse_layers(text: str) -> list[int]:
    """Return the numbers in `text`. Raises `UserError` for any other text."""
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"pp.layers = {text!r} must be even, balanced, or numbers such as 3,3,2") from None
    if min(counts) < 0:
        raise UserError(f"pp.layers = {text!r}: a chunk cannot have a negative number of layers")
    return counts
