"""Helpers for tests of tensor parallelism: settings, layers sharded by hand, and counted collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from femto_core.errors import UserError
from femto_ops import collectives
from femto_ops.deferral import WeightGradients
from femto_tools.testing import RandomTask, make_trainer, train_job
from femto_tp.column import ColumnGroup, ColumnParallelLinear
from femto_tp.cuts import even
from femto_tp.ranks import Ranks
from femto_tp.row import RowParallelLinear
from femto_tp.sequence import SequenceShards
from tests.merging import Values as Values
from tests.merging import merged as merged

F64 = torch.float64


def tp(size: int, sequence_parallel: bool = False) -> Values:
    return {"tp": {"size": size, "sequence_parallel": sequence_parallel}}


def train_tp(values: Values, plugins: Sequence[str] = (), task: RandomTask | None = None) -> dict[str, Any]:
    """Train as a worker's job, with plugin tp if `values` have a section tp."""
    return train_job(values, [*(["tp"] if "tp" in values else []), *plugins], task)


def refusal(values: Values, plugins: Sequence[str] = ("tp",), task: RandomTask | None = None) -> str:
    """Return the error that building a trainer raises, as a worker's job."""
    try:
        trainer = make_trainer(values, plugins, {"random_task": task or RandomTask()})
    except UserError as error:
        return str(error)
    trainer.close()
    return "not refused"


def all_ranks() -> Ranks:
    """Return all ranks of the job as one tensor parallel group."""
    world = dist.group.WORLD
    assert world is not None
    return Ranks(world)


def normal(seed: int, *shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    """Return normal numbers that depend only on the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf copy of `tensor` with the same strides that requires grad."""
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone())


def places(total: int, ranks: Ranks) -> slice:
    """Return this rank's range of 0..total-1."""
    mine = even(total, ranks.size)[ranks.rank]
    return slice(mine.start, mine.stop)


def columns(
    full: Mapping[str, tuple[torch.Tensor, torch.Tensor | None]],
    ranks: Ranks,
    weight_grads: WeightGradients,
    *,
    in_sequence: bool = False,
) -> tuple[dict[str, ColumnParallelLinear], ColumnGroup]:
    """Shard linear layers with the same input on their outputs."""
    group = ColumnGroup(ranks, weight_grads, sums_input_grad=not in_sequence)
    layers = {}
    for name, (weight, bias) in full.items():
        mine = places(len(weight), ranks)
        cut_bias = None if bias is None else parameter(bias[mine])
        layers[name] = ColumnParallelLinear(parameter(weight[mine]), cut_bias, group)
    return layers, group


def row(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: Ranks,
    weight_grads: WeightGradients,
    rows: SequenceShards | None = None,
) -> RowParallelLinear:
    """Shard a linear layer on its inputs."""
    mine = places(weight.shape[1], ranks)
    return RowParallelLinear(
        parameter(weight[:, mine]), None if bias is None else parameter(bias), ranks, weight_grads, rows
    )


def close(found: torch.Tensor | None, wanted: torch.Tensor | None, what: str = "") -> None:
    """Fail if two tensors differ by more than float64 rounding."""
    assert found is not None, what
    assert wanted is not None, what
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12, msg=lambda text: f"{what}: {text}")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """List the collectives started within the context, in order: (kind, elements of the whole tensor)."""
    seen: list[tuple[str, int]] = []

    def listening(kind: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def listen(whole: torch.Tensor, *others: Any) -> Any:
            seen.append((kind, whole.numel()))
            return right(whole, *others)

        return listen

    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    right = {kind: getattr(collectives, kind) for kind in kinds}
    try:
        for kind in kinds:
            setattr(collectives, kind, listening(kind, right[kind]))
        yield seen
    finally:
        for kind in kinds:
            setattr(collectives, kind, right[kind])
