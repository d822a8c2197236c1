"""The mesh of ranks: named axes over one world, and the collectives that work along them.

Besides the command line this is the only file that reads the environment: torchrun's RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE and TORCHELASTIC_RESTART_COUNT; and, through torch's rendezvous, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from femto_core.errors import UserError

c10d: Any = dist  # torch's stubs leave out the stores
DP = "dp"
DP_ORDER = 50


@attrs.frozen
class Axis:
    """One axis of the mesh. Ranks that differ only along an axis of larger `order` lie closer together."""

    name: str
    size: int
    order: int


def local_rank() -> int:
    """Return this process's number among those on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return how many processes of the run share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def pick_device() -> torch.device:
    """Return this process's device: the GPU of its local rank where there are GPUs and not gloo, otherwise the CPU."""
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank()} has no GPU: this machine has {torch.cuda.device_count()}; "
            "start fewer processes on it (--nproc-per-node)"
        )
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def init_process_group(device: torch.device) -> None:
    """Join the world that torchrun describes in the environment, or a world of one where there is none.

    A world of one is a process group like any other, so that nothing downstream asks whether there is one.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=30)
    rank, world_size = 0, 1
    store: Any
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        if local_world_size() == world_size:
            # On one machine torchrun keeps its store over a restart, with the addresses of the dead in it.
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = c10d.PrefixStore(f"restart-{restarts}", store)
    else:
        store = c10d.HashStore()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


class Mesh:
    """A grid over all ranks of the default process group: the axes of the plugins, and `dp`, which takes what remains.

    Every collective here must be called by each rank of the axes it names, or by none of them.
    """

    def __init__(self, axes: Sequence[Axis], device: torch.device) -> None:
        """Build the process groups; called by every rank with equal arguments.

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
        self.axes = tuple(sorted([*axes, Axis(DP, world // model_size, DP_ORDER)], key=lambda axis: axis.order))
        self._mesh: DeviceMesh = init_device_mesh(
            device.type, tuple(a.size for a in self.axes), mesh_dim_names=tuple(a.name for a in self.axes)
        )
        # Building a group takes the whole world, so joint ones are built here, not when only some ranks ask for them.
        long = [axis.name for axis in self.axes if axis.size > 1]
        joint = [frozenset(names) for n in range(2, len(long) + 1) for names in itertools.combinations(long, n)]
        self._joint = {names: self._build_joint(names) for names in joint}

    @property
    def rank(self) -> int:
        """This process's number in the world."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of processes in the world."""
        return dist.get_world_size()

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 1 for an axis that nobody added."""
        if frozenset({axis}) in self._joint:
            return self._joint[frozenset({axis})].size()
        return next((a.size for a in self.axes if a.name == axis), 1)

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along `axis`; 0 for an axis that nobody added."""
        return self._mesh.get_local_rank(axis) if any(a.name == axis for a in self.axes) else 0

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one only along `axes`, at least one of them."""
        present = [axis for axis in axes if self.size(axis) > 1] or axes[:1]
        names = frozenset(present)
        if names not in self._joint and len(names) > 1:
            raise ValueError(f"nobody built a group of the axes {', '.join(sorted(names))} together")
        return self._joint[names] if names in self._joint else self._mesh.get_group(present[0])

    def another_group(self, axis: str) -> dist.ProcessGroup:
        """Return a second group over the ranks of `axis`, for collectives that follow no common order with the first's.

        Called by every rank of the world.
        """
        return self._build_joint(frozenset([axis]))

    def lines(self, axis: str) -> list[list[int]]:
        """Return the world's ranks in lines along `axis`, each in the order of its coordinates."""
        place = [a.name for a in self.axes].index(axis)
        lines: list[list[int]] = self._mesh.mesh.movedim(place, -1).reshape(-1, self.axes[place].size).tolist()
        return lines

    def new_groups(self, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Build a group of each list of ranks; return the one with this rank. Called by every rank of the world."""
        mine = None
        for ranks in lists:
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                mine = group
        return mine

    def add_axis(self, name: str, lists: Sequence[Sequence[int]]) -> None:
        """Add an axis that only the ranks in `lists` lie on, each list one line; to all others it has size 1.

        For weights that some ranks of another axis share. It may be summed over alone, or together with `dp`.
        Called by every rank of the world.
        """
        group = self.new_groups(lists)
        dp_line = {rank: line for line in self.lines(DP) for rank in line}
        joint = {tuple(sorted({other for rank in ranks for other in dp_line[rank]})) for ranks in lists}
        group_with_dp = self.new_groups(sorted(joint))
        if group is not None and group_with_dp is not None:
            self._joint[frozenset({name})] = group
            self._joint[frozenset({DP, name})] = group_with_dp

    def sum(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """Sum `tensor` in place over the ranks of `axes` and return it; nothing is sent where that is one rank."""
        present = [axis for axis in axes if self.size(axis) > 1]
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

    def _build_joint(self, names: frozenset[str]) -> dist.ProcessGroup:
        ranks = self._mesh.mesh  # [size of each axis]: the rank at each place
        inside = [i for i, axis in enumerate(self.axes) if axis.name in names]
        outside = [i for i in range(ranks.dim()) if i not in inside]
        mine: dist.ProcessGroup | None = None
        for place in itertools.product(*(range(ranks.shape[i]) for i in outside)):
            members = ranks.permute(*outside, *inside)[place].flatten().tolist()
            group = dist.new_group(members)
            if self.rank in members:
                mine = group
        assert mine is not None, "every rank lies in exactly one of the groups"
        return mine
