"""Where a dimension is cut: evenly, or by whole attention heads."""

from __future__ import annotations

import itertools
from typing import Any

import attrs

from femto_core.errors import UserError


def even(total: int, size: int) -> list[range]:
    """Cut `total` places into one range for each rank; the first ranks have one more where it does not divide."""
    base, extra = divmod(total, size)
    starts = [rank * base + min(rank, extra) for rank in range(size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


@attrs.frozen(kw_only=True)
class HeadCut:
    """Which attention heads each rank computes.

    Key/value heads are cut evenly, each with the query heads that read it. Where there are more ranks than key/value
    heads, `copies` ranks in a row hold the same one and share its query heads out.
    """

    head_dim: int
    queries: tuple[range, ...]
    """Query heads of each rank."""
    key_values: tuple[range, ...]
    """Key/value heads of each rank."""
    copies: int
    """How many ranks hold the same key/value heads."""

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many."""
        return len({len(heads) for heads in self.queries}) == 1

    def rows(self, kind: str, rank: int) -> range:
        """Return the places of a rank's heads in a projection's output; `kind` is q or kv."""
        heads = (self.queries if kind == "q" else self.key_values)[rank]
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


def cut_heads(config: Any, size: int) -> HeadCut:
    """Cut the heads of a transformers config over `size` ranks.

    Raises `UserError` naming the sizes that work where this one does not.
    """
    heads, key_values = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not works(heads, key_values, size):
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if works(heads, key_values, n))
        raise UserError(
            f"tp.size = {size} cannot share out {heads} attention heads with {key_values} key/value heads; "
            f"sizes that can: {sizes}"
        )
    group = heads // key_values
    if size <= key_values:
        ours = even(key_values, size)
        queries = [range(r.start * group, r.stop * group) for r in ours]
        return HeadCut(head_dim=head_dim, queries=tuple(queries), key_values=tuple(ours), copies=1)
    copies = size // key_values
    share = group // copies
    return HeadCut(
        head_dim=head_dim,
        queries=tuple(range(rank * share, (rank + 1) * share) for rank in range(size)),
        key_values=tuple(range(rank // copies, rank // copies + 1) for rank in range(size)),
        copies=copies,
    )


def works(heads: int, key_values: int, size: int) -> bool:
    """Tell whether `size` ranks can share the heads out, each with at least one of both."""
    group = heads // key_values
    return size <= key_values or (size % key_values == 0 and group % (size // key_values) == 0)
