"""ParamLayout: the one record that says which part of which global parameter a rank holds.

Loading, checkpoints, gradient norm and export read nothing else. So a plugin that records its layouts correctly is
supported by all of them, and none of them needs to know the plugin.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs

from femto_core.mesh import Mesh


@attrs.frozen
class Box:
    """A rectangular part of a tensor: `offsets` and `sizes` along each of its dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that cuts this box out of the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


@attrs.frozen(kw_only=True)
class ParamLayout:
    """Where a local parameter lies in its global one, and how its gradient is to be read."""

    name: str
    """The full Hugging Face name; tied parameters go by the name under which the weight is saved."""
    global_shape: tuple[int, ...]
    box: Box
    """The part of the global tensor that this rank computes with."""
    flat: tuple[int, int]
    """The range of the flattened box that this rank updates and saves; a sharding strategy narrows it.

    A master may be padded: its first elements are the owned range; the padding is neither loaded nor saved."""
    partial: frozenset[str] = frozenset()
    """Mesh axes over which the local gradient is a partial sum: it must be summed over them."""
    replicated: frozenset[str] = frozenset()
    """Mesh axes over which all ranks hold this same part."""
    cut: frozenset[str] = frozenset()
    """Mesh axes over which ranks hold different boxes of the parameter."""
    sharded: frozenset[str] = frozenset()
    """Mesh axes over which ranks own different ranges of the same box."""
    tied: str = ""
    """Name of the group of parameters that are one weight in different places; empty: tied with none."""
    primary: bool = True
    """False for the copies of a tied weight: they are kept equal, but neither counted in norms nor saved."""

    @classmethod
    def whole(
        cls, name: str, shape: Collection[int], replicated: Collection[str], partial: Collection[str] = ()
    ) -> ParamLayout:
        """Return the layout of a parameter that every rank along the axes `replicated` holds entirely."""
        sizes = tuple(shape)
        return cls(
            name=name,
            global_shape=sizes,
            box=Box((0,) * len(sizes), sizes),
            flat=(0, math.prod(sizes)),
            partial=frozenset(partial),
            replicated=frozenset(replicated),
        )

    def sums_over(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of more than one rank over which the gradient must be summed, in alphabetical order."""
        return tuple(axis for axis in sorted(self.partial) if mesh.size(axis) > 1)

    def owned(self) -> list[Box]:
        """Return the boxes of the global tensor that the flat range covers, in its order."""
        inside = boxes_of_range(self.box.sizes, *self.flat)
        return [Box(tuple(a + b for a, b in zip(self.box.offsets, i.offsets, strict=True)), i.sizes) for i in inside]

    def replica(self, mesh: Mesh) -> tuple[int, int]:
        """Return this rank's number among the ranks that hold this same part, and how many hold it."""
        axes = sorted(self.replicated)
        return mesh.coordinate(*axes), mesh.size(*axes)

    def counts_on(self, mesh: Mesh) -> bool:
        """Tell whether this rank is the first of its replicas: the one that counts, and saves, the part."""
        return self.primary and mesh.coordinate(*self.replicated) == 0


def boxes_of_range(sizes: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut the range [start, stop) of a flattened tensor with `sizes` into the fewest boxes, in the range's order.

    At most 2 * len(sizes) - 1 boxes: partial rows at the front, whole rows, partial rows at the end, in each dimension.
    """
    if start >= stop:
        return []
    if not sizes:
        return [Box((), ())]
    inner = math.prod(sizes[1:])
    first, last = start // inner, (stop - 1) // inner
    if start == first * inner and stop == (last + 1) * inner:
        return [Box((first,) + (0,) * (len(sizes) - 1), (last + 1 - first, *sizes[1:]))]
    if first == last:
        offset = first * inner
        rest = boxes_of_range(sizes[1:], start - offset, stop - offset)
        return [Box((first, *box.offsets), (1, *box.sizes)) for box in rest]
    front = first + (start > first * inner)
    back = last + (stop == (last + 1) * inner)
    return [
        *boxes_of_range(sizes, start, front * inner),
        *boxes_of_range(sizes, front * inner, back * inner),
        *boxes_of_range(sizes, back * inner, stop),
    ]
