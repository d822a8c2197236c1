"""Parallel kinds: how a module is sharded, and which part of each parameter a rank holds.

A kind registers itself under a name, so a new kind needs no change here:

    @parallel_kind("column_fp8")
    class ColumnFP8Kind: ...
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
from femto_tp.sequence import SequenceShards


@attrs.frozen(kw_only=True)
class ParamShard:
    """The part of a parameter that one rank holds."""

    box: Box
    partial: bool = False
    """Whether each rank's gradient is a partial sum."""
    first: bool = True
    """Whether this rank is the first of those with this part: it counts in the gradient norm, and saves the part."""
    is_cut: bool = True
    """Whether ranks hold different parts; otherwise every rank holds the whole parameter."""


class ShardLoader(Protocol):
    """Says which part of a parameter a rank reads."""

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> ParamShard:
        """Return the part that `rank` of `size` holds of a parameter of `shape`."""


@attrs.frozen
class Whole:
    """The whole parameter, on every rank."""

    partial: bool = False

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> ParamShard:
        return ParamShard(box=Box((0,) * len(shape), shape), partial=self.partial, is_cut=False)


@attrs.frozen
class Cut:
    """One range along dimension `dim` per rank: even ranges, or `rows(rank)`."""

    dim: int
    rows: Callable[[int], range] | None = None
    replicas: int = 1
    """How many consecutive ranks hold the same range."""

    def shard(self, shape: tuple[int, ...], rank: int, size: int) -> ParamShard:
        mine = even(shape[self.dim], size)[rank] if self.rows is None else self.rows(rank)
        offsets = tuple(mine.start if dim == self.dim else 0 for dim in range(len(shape)))
        sizes = tuple(len(mine) if dim == self.dim else length for dim, length in enumerate(shape))
        return ParamShard(box=Box(offsets, sizes), first=rank % self.replicas == 0)


@attrs.define(kw_only=True)
class Context:
    """What kinds need to know about the stage that is being sharded."""

    mesh: Mesh
    ranks: Ranks
    heads: HeadCut
    replicas: Ranks | None
    """The ranks that hold the same key/value heads as this rank; None if no other rank does."""
    weight_grads: WeightGradients
    """Tells layers whether to defer their weights' gradients."""
    sequence: SequenceShards | None
    """Shards the sequence between layers; None without sequence parallelism."""
    groups: dict[str, ColumnGroup] = attrs.field(factory=dict)

    def column_group(self, name: str) -> ColumnGroup:
        """Return the group of column layers that have the same input as the module `name`."""
        parent, _, own = name.rpartition(".")
        shared = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
        key = f"{parent}.{shared.get(own, own)}"
        if key not in self.groups:
            # Under sequence parallelism the gather's backward reduces the input gradient.
            self.groups[key] = ColumnGroup(self.ranks, self.weight_grads, sums_input_grad=self.sequence is None)
        return self.groups[key]


class ParallelKind(Protocol):
    """How one kind of module is sharded."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        """Return the loader of the parameter called `suffix` (weight, bias)."""

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        """Return the module that replaces `module`; `parameters` are this rank's shards, by suffix."""


KINDS: dict[str, ParallelKind] = {}
K = TypeVar("K", bound=Callable[[], ParallelKind])


def parallel_kind(name: str) -> Callable[[K], K]:
    """Register a kind, constructed without arguments, under `name`. Raises ValueError if `name` is taken."""

    def register(make: K) -> K:
        if name in KINDS:
            raise ValueError(f"there is a parallel kind {name!r} already")
        KINDS[name] = make()
        return make

    return register


@attrs.frozen
class ColumnKind:
    """A linear layer sharded on its outputs: evenly, or by query (q) or key/value (kv) heads."""

    by: str = ""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        if not self.by:
            return Cut(0)
        heads, by = context.heads, self.by
        return Cut(0, lambda rank: heads.rows(by, rank), heads.replicas if by == "kv" else 1)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        check_is_plain(name, module)
        replicas = context.replicas if self.by == "kv" else None
        group = context.column_group(name)
        return ColumnParallelLinear(parameters["weight"], parameters.get("bias"), group, replicas)


@attrs.frozen
class RowKind:
    """A linear layer sharded on its inputs: evenly, or by query heads (q)."""

    by: str = ""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        if suffix == "bias":  # whole on every rank, and added to its part of the sequence
            return Whole(partial=context.sequence is not None)
        heads, by = context.heads, self.by
        return Cut(1, (lambda rank: heads.rows(by, rank)) if by else None)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        check_is_plain(name, module)
        return RowParallelLinear(
            parameters["weight"], parameters.get("bias"), context.ranks, context.weight_grads, context.sequence
        )


parallel_kind("column")(ColumnKind)
parallel_kind("column:q")(lambda: ColumnKind("q"))
parallel_kind("column:kv")(lambda: ColumnKind("kv"))
parallel_kind("row")(RowKind)
parallel_kind("row:q")(lambda: RowKind("q"))


@parallel_kind("embedding")
class EmbeddingKind:
    """An embedding sharded on the vocabulary."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Cut(0)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        if type(module).forward is not nn.Embedding.forward or not isinstance(module, nn.Embedding):
            raise UserError(
                f"tp shards {name} as a plain embedding, but {type(module).__name__} has a forward of its own; name a "
                "kind made for it in [tp.plan]"
            )
        start = even(module.num_embeddings, context.ranks.size)[context.ranks.rank].start
        return VocabParallelEmbedding(parameters["weight"], start, module.padding_idx, context.ranks)


@parallel_kind("head")
class HeadKind:
    """A head sharded on the vocabulary, like the embedding."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Cut(0)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UserError(
                f"tp shards {name} as a head, but {type(module).__name__} is not a linear layer; see [tp.plan]"
            )
        start = even(module.out_features, context.ranks.size)[context.ranks.rank].start
        return VocabParallelHead(
            parameters["weight"],
            start=start,
            vocab=module.out_features,
            ranks=context.ranks,
            sums_input_grad=context.sequence is None,
        )


@parallel_kind("norm")
class NormKind:
    """A norm between layers, whole on every rank; under sequence parallelism each rank sees other tokens."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Whole(partial=context.sequence is not None)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        return keep(module, parameters)


@parallel_kind("head_norm")
class HeadNormKind:
    """A norm over each head, whole on every rank; each rank sees other heads."""

    def loader(self, suffix: str, context: Context) -> ShardLoader:
        return Whole(partial=True)

    def build(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], context: Context) -> nn.Module:
        return keep(module, parameters)


def check_is_plain(name: str, module: nn.Module) -> None:
    """Raise `UserError` unless `module` computes what a plain linear layer does."""
    if type(module).forward not in (nn.Linear.forward, SplittingLinear.forward):
        raise UserError(
            f"tp shards {name} as a plain linear layer, but {type(module).__name__} has a forward of its own; name a "
            "kind made for it in [tp.plan]"
        )


def keep(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """Return `module` with its own parameters replaced by `parameters`."""
    for suffix, parameter in parameters.items():
        setattr(module, suffix, parameter)
    return module
