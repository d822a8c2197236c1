"""The gradient synchronisation seat: summing gradients over the ranks that saw other data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist
from torch import nn

from femto_core.mesh import DP, Mesh
from femto_core.model import Stage


class GradientSynchronizer(Protocol):
    """Sums gradients over `dp` and over each layout's partial axes. Gradients are sums: nothing is averaged."""

    def attach(self, stage: Stage) -> None:
        """Start to watch the stage's parameters, which have memory by now."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward only accumulates: for all micro-batches but the last."""

    def sync_gradients(self) -> None:
        """After the last backward: have every gradient complete on return; zero where a parameter was not used."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""

    def close(self) -> None:
        """Undo `attach`."""


class NoSync:
    """One rank has seen all the data. Only the promise about unused parameters remains to be kept."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def attach(self, stage: Stage) -> None:
        self._parameters = [p for _, p in stage.named_parameters() if p.requires_grad]

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sync_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._parameters = []


@attrs.define(eq=False)
class _Bucket:
    """Gradients that travel together: `flat` is their storage, each parameter's gradient a view of it."""

    axes: tuple[str, ...]
    flat: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    waiting: set[nn.Parameter] = attrs.field(factory=set)


class AllReduce:
    """Sums gradients in buckets, each sent as soon as it is full while backward goes on (Li et al. 2020, 3.2).

    A gradient lives in its bucket from its first micro-batch on: later ones are added in place, so that there is one
    copy of all gradients and none is moved before or after communication. Buckets are always sent in the same order, so
    that ranks which used different parameters still meet in the same collectives.
    """

    def __init__(self, mesh: Mesh, bucket_mib: float) -> None:
        self._mesh = mesh
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._buckets: list[_Bucket] = []
        self._home: dict[nn.Parameter, _Bucket] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._works: list[dist.Work] = []
        self._sent = 0
        self._accumulate_only = False

    def attach(self, stage: Stage) -> None:
        """Lay out the buckets in reverse order of the parameters, about the order in which backward completes them."""
        open_buckets: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
        for name, parameter in reversed(list(stage.named_parameters())):
            if not parameter.requires_grad:
                continue
            axes = tuple(a for a in sorted({DP, *stage.layouts[name].partial}) if self._mesh.size(a) > 1)
            key = (axes, parameter.dtype)
            members = open_buckets.setdefault(key, [])
            size = sum(p.numel() for p in members) * parameter.element_size()
            if members and size + parameter.numel() * parameter.element_size() > self._bucket_bytes:
                self._close_bucket(axes, open_buckets.pop(key))
                members = open_buckets.setdefault(key, [])
            members.append(parameter)
        for (axes, _), members in open_buckets.items():
            self._close_bucket(axes, members)
        self._reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._accumulate_only = True
        try:
            yield
        finally:
            self._accumulate_only = False

    def sync_gradients(self) -> None:
        for bucket in self._buckets[self._sent :]:
            for parameter, view in bucket.views.items():
                if parameter.grad is None:  # not used here, but perhaps on another rank
                    parameter.grad = view.zero_()
            bucket.waiting.clear()
        self._send_full()
        for work in self._works:
            work.wait()
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets, self._home = [], [], {}

    def _close_bucket(self, axes: tuple[str, ...], members: list[nn.Parameter]) -> None:
        flat = torch.empty(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
        parts = torch.split(flat, [p.numel() for p in members])
        bucket = _Bucket(axes, flat, {p: part.view_as(p) for p, part in zip(members, parts, strict=True)})
        self._buckets.append(bucket)
        for parameter in members:
            self._home[parameter] = bucket
            handle = parameter.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _on_grad(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        bucket = self._home[parameter]
        view = bucket.views[parameter]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        if not self._accumulate_only:
            if parameter not in bucket.waiting:
                raise RuntimeError("a gradient came twice in one step: an earlier backward failed; build a new trainer")
            bucket.waiting.remove(parameter)
            self._send_full()

    def _send_full(self) -> None:
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waiting:
            bucket = self._buckets[self._sent]
            if bucket.axes:
                work = dist.all_reduce(bucket.flat, group=self._mesh.group(*bucket.axes), async_op=True)
                assert work is not None
                self._works.append(work)
            self._sent += 1

    def _reset(self) -> None:
        self._works, self._sent = [], 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.views)
