"""Hybrid shards: a second axis whose ranks read other rows. `--zero.axes shard` shards within it,
and all-reduces across `dp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from femto_core.hookspecs import hookimpl
from femto_core.mesh import Axis


class HybridShards:
    """The plugin."""

    @hookimpl
    def femto_mesh_axes(self) -> Sequence[Axis]:
        return [Axis("shard", 2, 60, "rows")]
