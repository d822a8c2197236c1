"""The mesh of ranks: named axes over one world, and the collectives along them."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from femto_core.errors import UserError, suggest

DP = "dp"
DP_ORDER = 50
SPLITS = ("nothing", "rows", "tokens")


@attrs.frozen
class Axis:
    """One axis of the mesh: what its ranks split, and how close together they lie.

    Raises `UserError` for a `splits` that is none of `SPLITS`.
    """

    name: str
    size: int
    order: int
    """A larger order means faster-varying ranks: closer together, for instance within one machine."""
    splits: str
    """What differs between the batches of its ranks: "nothing" (the same rows: tp, pp), "rows" (other rows: dp), or
    "tokens" (other parts of the same rows: context parallelism)."""
    distinct_dropout: bool = attrs.field(default=True, kw_only=True)
    """Whether its ranks draw different random numbers; False only where all of them compute the same activations."""

    def __attrs_post_init__(self) -> None:
        if self.splits not in SPLITS:
            raise UserError(
                f"mesh axis {self.name!r} splits {self.splits!r}{suggest(self.splits, SPLITS)}; an axis splits one of "
                f"{', '.join(SPLITS)}"
            )


class Mesh:
    """A grid over all ranks of the default process group: the plugins' axes, and `dp`, which takes what remains.

    Every collective here must be called by each rank of the axes it names, or by none of them.
    """

    def __init__(self, axes: Sequence[Axis], device: torch.device, timeout_s: float | None = None) -> None:
        """Build the process groups; called by every rank with equal arguments.

        Collectives wait `timeout_s` seconds for other ranks; None: as long as torch decides.

        Raises `UserError` where two axes share a name or the sizes do not divide the world.
        """
        world = dist.get_world_size()
        names = [axis.name for axis in axes]
        if len({*names, DP}) != len(names) + 1:
            raise UserError(f"mesh axes must have different names, and none may be called {DP}: {', '.join(names)}")
        model_size = math.prod(axis.size for axis in axes)
        if min((axis.size for axis in axes), default=1) < 1 or world % model_size:
            sizes = " x ".join(f"{axis.name} {axis.size}" for axis in axes)
            raise UserError(
                f"{world} processes cannot be laid out as {sizes}: that needs a multiple of {model_size}; "
                "change the sizes or --nproc-per-node"
            )
        self.device = device
        everything = [*axes, Axis(DP, world // model_size, DP_ORDER, "rows")]
        self.axes = tuple(sorted(everything, key=lambda axis: axis.order))
        self._mesh: DeviceMesh = init_device_mesh(
            device.type, tuple(a.size for a in self.axes), mesh_dim_names=tuple(a.name for a in self.axes)
        )
        self._timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        for axis in self.axes:
            if self._timeout and dist.get_backend() != "fake":
                self._mesh.get_group(axis.name).set_timeout(self._timeout)
        # Building a group takes the whole world, so joint groups are built here, not when only some ranks ask for them.
        long = [axis.name for axis in self.axes if axis.size > 1]
        self._joint = {names: self._build_joint(names) for names in _subsets(long) if len(names) > 1}
        self._added: dict[str, list[list[int]]] = {}

    @property
    def rank(self) -> int:
        """This process's number in the world."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of processes in the world."""
        return dist.get_world_size()

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes whose ranks read different rows; outermost first."""
        return self._splitting("rows")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold different parts of the same rows; outermost first."""
        return self._splitting("tokens")

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks see different tokens: gradients, losses and counts are partial sums over them."""
        return self._splitting("rows", "tokens")

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its replicas, which see the same tokens: it contributes to sums."""
        return not any(self.coordinate(axis.name) for axis in self.axes if axis.splits == "nothing")

    def size(self, *axes: str) -> int:
        """Return the number of ranks along all of `axes` together; an axis that nobody added counts 1."""
        return math.prod(self._size(axis) for axis in axes)

    def coordinate(self, *axes: str) -> int:
        """Return this rank's number among those along all of `axes`, the last axis varying fastest.

        0 for an axis that nobody added.
        """
        number = 0
        for axis in axes:
            known = any(a.name == axis for a in self.axes)
            number = number * self._size(axis) + (self._mesh.get_local_rank(axis) if known else 0)
        return number

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one only along `axes`, at least one of them."""
        present = [axis for axis in axes if self._size(axis) > 1] or axes[:1]
        names = frozenset(present)
        if names not in self._joint and len(names) > 1:
            raise ValueError(f"nobody built a group of the axes {', '.join(sorted(names))} together")
        return self._joint[names] if names in self._joint else self._mesh.get_group(present[0])

    def another_group(self, *axes: str) -> dist.ProcessGroup:
        """Return a second group over the ranks of `axes`, for collectives that follow no common order with the first's.

        Called by every rank of the world.
        """
        return self._build_joint(frozenset(axes))

    def lines(self, axis: str) -> list[list[int]]:
        """Return the world's ranks in lines along `axis`, each in the order of its coordinates."""
        return self._blocks(frozenset({axis}))

    def new_groups(self, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Build a group of each list of ranks; return this rank's, if any. Called by every rank of the world."""
        mine = None
        for ranks in lists:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            if self.rank in ranks:
                mine = group
        return mine

    def add_axis(self, name: str, lists: Sequence[Sequence[int]]) -> None:
        """Add an axis on which only the ranks in `lists` lie, each list one line; for all other ranks it has size 1.

        It is for weights that some ranks of another axis share, and may be summed over alone or together with
        `data_axes`. Adding the same axis again changes nothing. Called by every rank of the world. Raises ValueError
        where the name is another axis's.
        """
        ranks_of_lines = sorted(sorted(ranks) for ranks in lists)
        if any(axis.name == name for axis in self.axes):
            raise ValueError(f"the mesh has an axis {name!r} already")
        if name in self._added:
            if self._added[name] != ranks_of_lines:
                raise ValueError(f"mesh axis {name!r} was added before, along other ranks")
            return
        self._added[name] = ranks_of_lines
        for subset in _subsets([axis for axis in self.data_axes if self._size(axis) > 1]):
            others = {rank: block for block in self._blocks(subset) for rank in block}
            joined = {tuple(sorted({other for rank in ranks for other in others[rank]})) for ranks in lists}
            if (group := self.new_groups(sorted(joined))) is not None:
                self._joint[subset | {name}] = group

    def sum(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """Sum `tensor` in place over the ranks of `axes` and return it; nothing is sent where they are one rank."""
        present = [axis for axis in axes if self._size(axis) > 1]
        if present:
            dist.all_reduce(tensor, group=self.group(*present))
        return tensor

    def sum_world(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` in place over all ranks and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value` (anything picklable), in rank order, on every rank of the world."""
        if self.world_size == 1 or dist.get_backend() == "fake":  # torch's group of imagined ranks, all like this one
            return [value] * self.world_size
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank of the world."""
        if dist.get_backend() == "fake":
            return value
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for every rank of the world."""
        if self.world_size > 1:
            dist.barrier()

    def __str__(self) -> str:
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)

    def _size(self, axis: str) -> int:
        if frozenset({axis}) in self._joint:
            return self._joint[frozenset({axis})].size()
        return next((a.size for a in self.axes if a.name == axis), 1)

    def _splitting(self, *kinds: str) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes if axis.splits in kinds)

    def _blocks(self, names: frozenset[str]) -> list[list[int]]:
        """Return the world's ranks in blocks, each of the ranks that differ only along the axes `names`."""
        inside = [place for place, axis in enumerate(self.axes) if axis.name in names]
        outside = [place for place in range(len(self.axes)) if place not in inside]
        ranks = self._mesh.mesh.permute(*outside, *inside)  # [size of each axis]: the rank at each place
        blocks: list[list[int]] = ranks.reshape(-1, math.prod(self.axes[place].size for place in inside)).tolist()
        return blocks

    def _build_joint(self, names: frozenset[str]) -> dist.ProcessGroup:
        mine = self.new_groups(self._blocks(names))
        assert mine is not None, "every rank lies in exactly one of the groups"
        return mine


def _subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """Return every set of some of `names`, the empty one included, small ones first."""
    return [frozenset(some) for n in range(len(names) + 1) for some in itertools.combinations(names, n)]
