"""Parallel kinds: how a module is cut, and which part of each of its parameters a rank holds.

A kind is registered under its name, where it is defined; a new one touches nothing here:

    @parallel_kind("column_fp8")
    class ColumnFP8: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import attrs
from torch import nn

from femto_core.errors import UserError
from femto_core.layout import Box
from femto_core.mesh import Mesh
from femto_ops.deferral import WeightGradients
from femto_ops.linear import SplittingLinear
from femto_tp.column import ColumnGroup, ColumnParallelLinear
from femto_tp.cuts import HeadCut, even
from femto_tp.embedding import VocabParallelEmbedding
from femto_tp.head import VocabParallelHead
from femto_tp.ranks import Ranks
from femto_tp.row import RowParallelLinear
from femto_tp.sequence import Sequence


@attrs.frozen(kw_only=True)
class Shard:
    """What one rank holds of a parameter."""

    box: Box
    partial: bool = False
    """Its gradient is a partial sum on each rank."""
    first: bool = True
    """Whether this is the first of the ranks that hold this part: the one that counts, and saves it."""
    is_cut: bool = True
    """Whether ranks hold different parts at all."""


class ShardLoader(Protocol):
    """Says which part of a parameter is read."""

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> Shard:
        """Return what `rank` of `size` holds of a parameter of `shape`."""


@attrs.frozen
class Whole:
    """All of it, on every rank."""

    partial: bool = False

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> Shard:
        return Shard(box=Box((0,) * len(shape), shape), partial=self.partial, is_cut=False)


@attrs.frozen
class Cut:
    """One range along a dimension, evenly or as `rows` says."""

    dim: int
    rows: Callable[[int], range] | None = None
    copies: int = 1

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> Shard:
        mine = even(shape[self.dim], size)[rank] if self.rows is None else self.rows(rank)
        offsets = tuple(mine.start if dim == self.dim else 0 for dim in range(len(shape)))
        sizes = tuple(len(mine) if dim == self.dim else length for dim, length in enumerate(shape))
        return Shard(box=Box(offsets, sizes), first=rank % self.copies == 0)


@attrs.define(kw_only=True)
class Context:
    """What kinds need to know of the stage that is being cut."""

    mesh: Mesh
    ranks: Ranks
    heads: HeadCut
    copies: Ranks | None
    """The ranks that hold the same key/value heads."""
    later: WeightGradients
    """Where layers ask whether to put off their weights' gradients."""
    sequence: Sequence | None
    """The sequence whose parts the ranks hold between layers, under sequence parallelism."""
    groups: dict[str, ColumnGroup] = attrs.field(factory=dict)

    def column_group(self, name: str) -> ColumnGroup:
        """Return the group of column layers that share the input of the module `name`."""
        parent, _, own = name.rpartition(".")
        shared = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        key = f"{parent}.{shared.get(own, own)}"
        if key not in self.groups:
            # Under sequence parallelism whoever gathered the input sums its gradient.
            self.groups[key] = ColumnGroup(self.ranks, self.later, sums_input_grad=self.sequence is None)
        return self.groups[key]


class ParallelKind(Protocol):
    """How one kind of module is cut."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        """Return what reads the parameter called `suffix` (weight, bias)."""

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        """Return the module that stands in for `module`, with this rank's `parameters` by suffix."""


KINDS: dict[str, ParallelKind] = {}
K = TypeVar("K", bound=Callable[[], ParallelKind])


def parallel_kind(name: str) -> Callable[[K], K]:
    """Register a kind, which is made without arguments, under `name`. Raises ValueError where it is taken."""

    def register(make: K) -> K:
        if name in KINDS:
            raise ValueError(f"there is a parallel kind {name!r} already")
        KINDS[name] = make()
        return make

    return register


@attrs.frozen
class Column:
    """A linear layer cut on its outputs: evenly, or by query (q) or key/value (kv) heads."""

    by: str = ""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        if not self.by:
            return Cut(0)
        heads, by = context.heads, self.by
        return Cut(0, lambda rank: heads.rows(by, rank), heads.copies if by == "kv" else 1)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        check_is_plain(name, module)
        copies = context.copies if self.by == "kv" else None
        group = context.column_group(name)
        return ColumnParallelLinear(parameters["weight"], parameters.get("bias"), group, copies)


@attrs.frozen
class Row:
    """A linear layer cut on its inputs: evenly, or by query heads (q)."""

    by: str = ""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        if suffix == "bias":  # added to each rank's part of the sequence
            return Whole(partial=context.sequence is not None)
        heads, by = context.heads, self.by
        return Cut(1, (lambda rank: heads.rows(by, rank)) if by else None)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        check_is_plain(name, module)
        return RowParallelLinear(
            parameters["weight"], parameters.get("bias"), context.ranks, context.later, context.sequence
        )


parallel_kind("column")(Column)
parallel_kind("column:q")(lambda: Column("q"))
parallel_kind("column:kv")(lambda: Column("kv"))
parallel_kind("row")(Row)
parallel_kind("row:q")(lambda: Row("q"))


@parallel_kind("embedding")
class Embedding:
    """An embedding cut on the vocabulary."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Cut(0)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        if type(module).forward is not nn.Embedding.forward or not isinstance(module, nn.Embedding):
            raise UserError(
                f"tp cuts {name} as a plain embedding, but {type(module).__name__} has a forward of its own; name a "
                "kind that was made for it in [tp.plan]"
            )
        start = even(module.num_embeddings, context.ranks.size)[context.ranks.rank].start
        return VocabParallelEmbedding(parameters["weight"], start, module.padding_idx, context.ranks)


@parallel_kind("head")
class Head:
    """A head cut on the vocabulary, like the embedding."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Cut(0)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UserError(f"tp cuts {name} as a head, but {type(module).__name__} is no linear layer; see [tp.plan]")
        start = even(module.out_features, context.ranks.size)[context.ranks.rank].start
        return VocabParallelHead(
            parameters["weight"],
            start=start,
            vocab=module.out_features,
            ranks=context.ranks,
            sums_input_grad=context.sequence is None,
        )


@parallel_kind("norm")
class Norm:
    """A norm between layers: whole on every rank, which under sequence parallelism sees only a part of the sequence."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Whole(partial=context.sequence is not None)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        return keep(module, parameters)


@parallel_kind("head_norm")
class HeadNorm:
    """A norm over each head: whole on every rank, which sees only its own heads."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Whole(partial=True)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        return keep(module, parameters)


def check_is_plain(name: str, module: nn.Module) -> None:
    """Raise `UserError` where `module` computes something else than the linear layer that takes its place."""
    if type(module).forward not in (nn.Linear.forward, SplittingLinear.forward):
        raise UserError(
            f"tp cuts {name} as a plain linear layer, but {type(module).__name__} has a forward of its own; name a "
            "kind that was made for it in [tp.plan]"
        )


def keep(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """Return `module` itself, with `parameters` in the places of its own."""
    for suffix, parameter in parameters.items():
        setattr(module, suffix, parameter)
    return module
