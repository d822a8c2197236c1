"""How a dimension is divided among ranks: evenly, or by whole attention heads."""

from __future__ import annotations

import itertools
from typing import Any

import attrs

from femto_core.errors import UserError
from femto_ops.flops import head_dim


def even(total: int, size: int) -> list[range]:
    """Divide 0..total-1 into one range per rank; if `size` does not divide `total`, the first ranks get one more."""
    base, extra = divmod(total, size)
    starts = [rank * base + min(rank, extra) for rank in range(size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


@attrs.frozen(kw_only=True)
class HeadCut:
    """Which attention heads each rank computes.

    Key/value heads are divided evenly, each with the query heads that read it. If there are more ranks than key/value
    heads, `replicas` consecutive ranks hold the same key/value head and divide its query heads.
    """

    head_dim: int
    queries: tuple[range, ...]
    """Query heads of each rank."""
    key_values: tuple[range, ...]
    """Key/value heads of each rank."""
    replicas: int
    """How many ranks hold the same key/value heads."""

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many heads."""
        return len({len(heads) for heads in self.queries}) == 1

    def rows(self, kind: str, rank: int) -> range:
        """Return the rows of a rank's heads in a projection's weight; `kind` is q or kv."""
        heads = (self.queries if kind == "q" else self.key_values)[rank]
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


def cut_heads(config: Any, size: int) -> HeadCut:
    """Divide the heads of a transformers config among `size` ranks.

    Raises `UserError`, naming the sizes that work, if this size does not.
    """
    heads, key_values = config.num_attention_heads, config.num_key_value_heads
    if not works(heads, key_values, size):
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if works(heads, key_values, n))
        raise UserError(
            f"tp.size = {size} cannot divide {heads} attention heads with {key_values} key/value heads; "
            f"sizes that can: {sizes}"
        )
    group = heads // key_values
    if size <= key_values:
        ours = even(key_values, size)
        queries = [range(r.start * group, r.stop * group) for r in ours]
        return HeadCut(head_dim=head_dim(config), queries=tuple(queries), key_values=tuple(ours), replicas=1)
    replicas = size // key_values
    share = group // replicas
    return HeadCut(
        head_dim=head_dim(config),
        queries=tuple(range(rank * share, (rank + 1) * share) for rank in range(size)),
        key_values=tuple(range(rank // replicas, rank // replicas + 1) for rank in range(size)),
        replicas=replicas,
    )


def works(heads: int, key_values: int, size: int) -> bool:
    """Return whether `size` ranks can divide the heads, each with at least one query and one key/value head."""
    group = heads // key_values
    return size <= key_values or (size % key_values == 0 and group % (size // key_values) == 0)
