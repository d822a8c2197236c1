"""Gradients that all ranks sum: over the right ranks, whatever is used where, and nothing left behind."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import backward

from femto_core.layout import ParamLayout
from femto_core.mesh import Axis, Mesh
from femto_core.model import Stage
from femto_core.precision import SinglePrecision
from femto_core.replicated import AllReduce, LocalSums
from femto_ops import collectives
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from femto_tools.workers import WorkerFailedError

CPU = torch.device("cpu")
TP = Axis("tp", 2, 100, "nothing")
BUCKETS_MIB = (0.0, 1e-5, 2e-5, 25.0)
"""Every parameter alone; 10 bytes, less than two float64; 20 bytes; all together."""
SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "scalar": (),
    "seven": (7,),
    "matrix": (3, 5),
    "empty": (0, 4),
    "large": (57, 3),
    "last": (2,),
}


@attrs.frozen(eq=False)
class Parts:
    """Named parameters with layouts, which is all of a stage that a synchroniser asks for."""

    parameters: dict[str, nn.Parameter]
    layouts: dict[str, ParamLayout]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.parameters.items()

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        yield from ()

    def use(self, names: Sequence[str], weight: float) -> torch.Tensor:
        """Return a loss that gives each element of the parameters `names` the gradient `weight` times its number."""
        terms = [(self.parameters[n] * numbered(self.parameters[n])).sum() for n in names]
        return weight * torch.stack(terms).sum()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Any]:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.parameters.items()}


def numbered(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, like.numel() + 1, dtype=like.dtype).view(like.shape)


def make_parts(partial: Sequence[str] = (), frozen: Sequence[str] = ()) -> Parts:
    parameters = {
        name: nn.Parameter(torch.zeros(shape, dtype=torch.float64), requires_grad=name not in frozen)
        for name, shape in SHAPES.items()
    }
    layouts = {
        name: ParamLayout.whole(name, shape, (), ("dp", "tp") if name in partial else ("dp",))
        for name, shape in SHAPES.items()
    }
    return Parts(parameters, layouts)


def attached(mesh: Mesh, parts: Parts, bucket_mib: float) -> AllReduce:
    sync = AllReduce(mesh, bucket_mib)
    sync.attach(cast(Stage, parts), SinglePrecision(torch.float64))
    return sync


def check(parts: Parts, expected: Callable[[str], float]) -> None:
    """Every gradient is the numbers of its elements times `expected(name)`, exactly."""
    for name, gradient in parts.gradients().items():
        assert gradient is not None, name
        assert gradient.shape == SHAPES[name]
        assert torch.equal(gradient, expected(name) * numbered(gradient)), name


ALL = tuple(SHAPES)


def sums_for_every_bucket_size() -> bool:
    mesh = Mesh([], CPU)
    for bucket_mib in BUCKETS_MIB:
        parts = make_parts()
        sync = attached(mesh, parts, bucket_mib)
        for step in range(1, 4):  # later steps must not see earlier ones
            backward(parts.use(ALL, step * 10.0**mesh.rank))
            sync.finish()
            check(parts, lambda _: step * float("1" * mesh.world_size))  # noqa: B023 - called at once
            parts.zero_grad()
        sync.close()
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_odd_sizes_single_elements_and_empty_tensors_are_summed_in_any_bucket(pool: WorkerPool, size: int) -> None:
    assert pool.run(size, sums_for_every_bucket_size) == [True] * size


def unused() -> bool:
    mesh = Mesh([], CPU)
    here = {0: ("one", "large"), 1: ("large", "matrix", "last"), 2: (), 3: ("seven",)}
    for bucket_mib in BUCKETS_MIB:
        parts = make_parts()
        sync = attached(mesh, parts, bucket_mib)
        backward(parts.use(ALL, 1000.0))  # leaves values in the buckets that must not come back
        sync.finish()
        for _ in range(2):
            parts.zero_grad()
            if here[mesh.rank]:
                backward(parts.use(here[mesh.rank], 10.0**mesh.rank))
            sync.finish()
            check(parts, lambda name: float(sum(10**rank for rank, names in here.items() if name in names)))
        sync.close()
    return True


def test_parameters_unused_on_one_rank_or_on_all_are_summed_with_zeros(pool: WorkerPool) -> None:
    assert pool.run(4, unused) == [True] * 4


def accumulation() -> list[int]:
    mesh = Mesh([], CPU)
    parts = make_parts()
    sync = attached(mesh, parts, 0.0)
    sent = []
    times = {"one": 3.0, "matrix": 3.0, "last": 2.0}
    for _ in range(2):
        with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as calls:
            for names in (ALL, ("one", "matrix"), ("matrix",)):
                with sync.no_sync():
                    backward(parts.use(names, 10.0**mesh.rank))
            sent.append(calls.call_count)
            backward(parts.use(("last", "one"), 10.0**mesh.rank))
            sent.append(calls.call_count)  # the bucket of "last" is the first in the order
            sync.finish()
            sent.append(calls.call_count)
        check(parts, lambda name: 11.0 * times.get(name, 1))
        parts.zero_grad()
    return sent


def test_micro_batches_inside_no_sync_send_nothing_and_are_counted_once(pool: WorkerPool) -> None:
    assert pool.run(2, accumulation) == [[0, 1, len(SHAPES)] * 2] * 2


def an_exception_inside_no_sync() -> bool:
    mesh = Mesh([], CPU)
    parts = make_parts()
    sync = attached(mesh, parts, 25.0)
    try:
        with sync.no_sync():
            raise KeyError
    except KeyError:
        pass
    backward(parts.use(ALL, 1.0))
    sync.finish()
    check(parts, lambda _: 2.0)
    return True


def test_an_exception_inside_no_sync_ends_it(pool: WorkerPool) -> None:
    assert pool.run(2, an_exception_inside_no_sync) == [True] * 2


def partial_axes() -> bool:
    mesh = Mesh([TP], CPU)
    along_dp = {0: 101.0, 1: 1010.0}[mesh.coordinate("tp")]
    for bucket_mib in BUCKETS_MIB:
        parts = make_parts(partial=("one", "large"))
        sync = attached(mesh, parts, bucket_mib)
        backward(parts.use(ALL, 10.0**mesh.rank))
        sync.finish()
        check(parts, lambda name: 1111.0 if name in ("one", "large") else along_dp)
        sync.close()
    return True


def test_a_gradient_that_its_layout_calls_partial_is_summed_over_that_axis_too(pool: WorkerPool) -> None:
    assert pool.run(4, partial_axes) == [True] * 4


def partial_without_dp() -> bool:
    mesh = Mesh([TP], CPU)
    parts = make_parts(partial=("one", "large"))
    sync = attached(mesh, parts, 0.0)
    with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as calls:
        backward(parts.use(ALL, 10.0**mesh.rank))
        sync.finish()
    assert calls.call_count == 2, "what no other rank has a share of needs no communication"
    check(parts, lambda name: 11.0 if name in ("one", "large") else 10.0**mesh.rank)
    return True


def test_without_dp_only_partial_gradients_travel(pool: WorkerPool) -> None:
    assert pool.run(2, partial_without_dp) == [True] * 2


def order_of_sends() -> list[int]:
    mesh = Mesh([TP], CPU)
    parts = make_parts(partial=("seven",))
    sync = attached(mesh, parts, 0.0)
    orders = [ALL, ALL[::-1], ("large", "one"), ("seven", "last")]
    with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as calls:
        for step in range(4):
            for name in orders[(mesh.rank + step) % 4]:  # several graphs, so that hooks fire in this very order
                with sync.no_sync():
                    backward(parts.use((name,), 1.0))
            backward(parts.use(orders[(mesh.rank + step) % 4], 1.0))
            sync.finish()
            parts.zero_grad()
        return [call.args[0].numel() for call in calls.call_args_list]


def test_ranks_that_use_other_parameters_send_in_the_same_order(pool: WorkerPool) -> None:
    answers = pool.run(4, order_of_sends, timeout_s=30)
    assert answers[1:] == answers[:3]
    assert len(answers[0]) == 4 * len(SHAPES)
    assert answers[0] == answers[0][: len(SHAPES)] * 4


def sent_during_backward() -> tuple[int, int]:
    mesh = Mesh([], CPU)
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)])
    names = dict(layers.named_parameters())
    parts = Parts(names, {name: ParamLayout.whole(name, p.shape, (), ("dp",)) for name, p in names.items()})
    sync = attached(mesh, parts, 0.0)
    with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as calls:
        seen: list[int] = []
        x = torch.ones(1, 4, requires_grad=True)
        x.register_hook(lambda _: seen.append(calls.call_count))  # type: ignore[no-untyped-call]
        backward(layers(x).sum())
        sync.finish()
        return seen[0], calls.call_count


def test_buckets_leave_while_backward_goes_on(pool: WorkerPool) -> None:
    for during, total in pool.run(2, sent_during_backward):
        assert total == 6
        assert during >= 5  # the first layer's own bucket may leave just after its input's gradient


def frozen_parameters() -> bool:
    mesh = Mesh([], CPU)
    for bucket_mib in BUCKETS_MIB:
        parts = make_parts(frozen=("large", "one"))
        sync = attached(mesh, parts, bucket_mib)
        for _ in range(2):
            backward(parts.use(ALL, 10.0**mesh.rank))
            sync.finish()
            gradients = parts.gradients()
            assert gradients["large"] is None
            assert gradients["one"] is None
            assert torch.equal(gradients["seven"], 11 * numbered(gradients["seven"]))
            parts.zero_grad()
        sync.close()
    nothing = make_parts(frozen=ALL)
    sync = attached(mesh, nothing, 25.0)
    sync.finish()
    assert set(nothing.gradients().values()) == {None}
    return True


def test_frozen_parameters_get_no_gradient_and_are_not_sent(pool: WorkerPool) -> None:
    assert pool.run(2, frozen_parameters) == [True] * 2


def tensor_bytes() -> int:
    gc.collect()
    tensors = (t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def attach_and_close_many_times() -> tuple[int, int, int, int]:
    mesh = Mesh([], CPU)
    parts = make_parts()
    alive: list[weakref.ref[AllReduce]] = []
    bytes_after = []
    for _ in range(100):
        sync = attached(mesh, parts, 1e-4)
        backward(parts.use(ALL, 1.0))
        sync.finish()
        sync.close()
        parts.zero_grad()
        alive.append(weakref.ref(sync))
        del sync
        if len(alive) in (10, 100):
            bytes_after.append(tensor_bytes())
    hooks: Any = [p._post_accumulate_grad_hooks or {} for p in parts.parameters.values()]
    gc.collect()
    backward(parts.use(ALL, 1.0))  # nobody listens any more
    assert parts.gradients()["one"].item() == 1.0
    return sum(map(len, hooks)), sum(ref() is not None for ref in alive), bytes_after[0], bytes_after[1]


def test_a_hundred_synchronisers_leave_no_hook_no_object_and_no_memory(pool: WorkerPool) -> None:
    for hooks, alive, early, late in pool.run(2, attach_and_close_many_times):
        assert hooks == 0
        assert alive == 0
        assert late - early < 1000, "ninety more synchronisers, each with buckets of 1576 bytes"


def build_and_close_trainers() -> tuple[int, int]:
    sizes = []
    for _ in range(6):
        trainer = make_trainer({"train": {"steps": 3}, "optim": {"warmup": 0}})
        trainer.train_step()
        trainer.close()
        del trainer
        sizes.append(tensor_bytes())
    return sizes[1], sizes[-1]


def test_trainers_built_and_closed_again_and_again_leave_no_tensors(pool: WorkerPool) -> None:
    for early, late in pool.run(2, build_and_close_trainers):
        assert late <= early


class Breaks(torch.autograd.Function):
    """Fails in backward, as running out of memory does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise MemoryError("out of memory")


def step_after_an_exception(bucket_mib: float) -> str:
    """All ranks fail at the same place, half way through backward, and try again."""
    mesh = Mesh([], CPU)
    layers = nn.Sequential(*[nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(4)])
    names = dict(layers.named_parameters())
    parts = Parts(names, {name: ParamLayout.whole(name, p.shape, (), ("dp",)) for name, p in names.items()})
    sync = attached(mesh, parts, bucket_mib)
    x = torch.full((2, 3), 1.0 + mesh.rank, dtype=torch.float64)
    try:
        middle: Any = Breaks.apply(layers[:2](x))  # type: ignore[no-untyped-call]
        backward(layers[2:](middle).sum())
    except MemoryError:
        pass
    else:
        return "did not fail"
    try:
        parts.zero_grad()
        backward(layers(x).sum())
        sync.finish()
        got = parts.gradients()
    except RuntimeError as error:
        return f"broken: {error}"
    sync.close()
    parts.zero_grad()
    both = torch.cat([torch.full((2, 3), 1.0 + rank, dtype=torch.float64) for rank in range(2)])
    backward(layers(both).sum())
    right = all(torch.allclose(got[name], parts.gradients()[name]) for name in got)
    return "right" if right else "WRONG GRADIENTS"


@pytest.mark.parametrize("bucket_mib", [0.0, 1.5e-4, 25.0])
def test_after_an_exception_in_backward_the_next_step_is_right_or_refused(pool: WorkerPool, bucket_mib: float) -> None:
    for answer in pool.run(2, step_after_an_exception, bucket_mib, timeout_s=30):
        assert answer == "right" or answer.startswith("broken: "), answer
        if answer != "right":
            assert "earlier backward" in answer


def a_rank_that_dies() -> None:
    """Rank 1 is gone after the first step; rank 0 must not wait for ever in the second."""
    trainer = make_trainer({})
    trainer.train_step()
    if trainer.mesh.rank == 1:
        os._exit(1)
    trainer.train_step()


def test_when_one_rank_dies_the_others_end_with_an_error() -> None:
    own = WorkerPool(2)
    started = time.perf_counter()
    with pytest.raises(WorkerFailedError, match=r"(?s)rank 0.*Traceback.*Error.*rank 1.*the worker died"):
        own.run(2, a_rank_that_dies)
    assert time.perf_counter() - started < 60
    own.close()


def a_rank_that_raises() -> None:
    trainer = make_trainer({})
    trainer.train_step()
    if trainer.mesh.rank == 1:
        raise KeyError("told by rank 1")
    time.sleep(1000)


def test_when_one_rank_raises_the_others_are_not_waited_for() -> None:
    own = WorkerPool(2)
    started = time.perf_counter()
    with pytest.raises(WorkerFailedError, match=r"(?s)rank 0.*no answer.*rank 1.*KeyError.*told by rank 1"):
        own.run(2, a_rank_that_raises)
    assert time.perf_counter() - started < 60
    own.close()


def test_one_rank_alone_only_fills_in_zeros() -> None:
    parts = make_parts(frozen=("seven",))
    sync = LocalSums()
    sync.attach(cast(Stage, parts), SinglePrecision(torch.float64))
    with sync.no_sync():
        backward(parts.use(("one", "large"), 2.0))
    backward(parts.use(("one",), 1.0))
    sync.finish()
    gradients = parts.gradients()
    assert gradients.pop("seven") is None
    times = {"one": 3.0, "large": 2.0}
    for name, gradient in gradients.items():
        assert torch.equal(gradient, times.get(name, 0.0) * numbered(gradient)), name
    sync.close()


def communication_of_one_rank() -> int:
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        trainer = make_trainer({}, (), {"random_task": RandomTask()})
        trainer.train_step()
        trainer.close()
    return calls.call_count


def test_one_rank_alone_sends_nothing(pool: WorkerPool) -> None:
    assert pool.run(1, communication_of_one_rank) == [0]
