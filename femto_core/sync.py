"""The gradient synchronisation seat: summing gradients over the ranks that saw other data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from femto_core.buckets import Bucket, GradientCollector, backward_order
from femto_core.mesh import DP, Mesh
from femto_core.model import Stage
from femto_core.precision import MixedPrecisionManager
from femto_ops import collectives
from femto_ops.collectives import Pending


class GradientSynchronizer(Protocol):
    """Sums gradients over `dp` and over each layout's partial axes. Gradients are sums: nothing is averaged."""

    def attach(self, stage: Stage, precision: MixedPrecisionManager) -> None:
        """Start to watch the stage's parameters, which have memory by now."""

    def no_sync(self, *, complete: bool = True) -> contextlib.AbstractContextManager[None]:
        """Around the backward of each micro-batch but the last: there is more to come.

        Without `complete` there is more to come of this micro-batch too.
        """

    def sync_gradients(self) -> None:
        """After the last backward: have every gradient complete on return; zero where a parameter was not used."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""

    def close(self) -> None:
        """Undo `attach`."""


class NoSync:
    """One rank has seen all the data: gradients add up where autograd puts them."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def attach(self, stage: Stage, precision: MixedPrecisionManager) -> None:
        self._parameters = [p for _, p in stage.named_parameters() if p.requires_grad]
        for parameter in self._parameters:
            parameter.grad_dtype = precision.accumulate_dtype(parameter.dtype)

    def no_sync(self, *, complete: bool = True) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sync_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._parameters = []


class AllReduce:
    """Sums gradients in buckets, each sent as soon as it is full while backward goes on (Li et al. 2020, 3.2).

    A gradient is collected in its bucket from its first micro-batch on, in the dtype that the precision wants sums in:
    there is one copy of all gradients.
    """

    def __init__(self, mesh: Mesh, bucket_mib: float) -> None:
        self._mesh = mesh
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._collector = GradientCollector([], self._send)
        self._under_way: list[Pending] = []

    def attach(self, stage: Stage, precision: MixedPrecisionManager) -> None:
        """Lay out the buckets in `backward_order`."""
        open_buckets: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
        buckets: list[Bucket] = []

        def close_bucket(axes: tuple[str, ...], members: list[nn.Parameter]) -> None:
            dtype = members[0].dtype
            buckets.append(
                Bucket(
                    members,
                    dtype=precision.accumulate_dtype(dtype),
                    wire_dtype=precision.reduce_dtype(dtype),
                    group=self._mesh.group(*axes) if axes else None,
                    at_end=bool({*axes} - {DP}),
                )
            )

        parameters = dict(stage.named_parameters())
        for name in backward_order(stage):
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            axes = tuple(a for a in sorted({DP, *stage.layouts[name].partial}) if self._mesh.size(a) > 1)
            key = (axes, parameter.dtype)
            members = open_buckets.setdefault(key, [])
            size = sum(p.numel() for p in members) * parameter.element_size()
            if members and size + parameter.numel() * parameter.element_size() > self._bucket_bytes:
                close_bucket(axes, open_buckets.pop(key))
                members = open_buckets.setdefault(key, [])
            members.append(parameter)
        for (axes, _), members in open_buckets.items():
            close_bucket(axes, members)
        buckets.sort(key=lambda bucket: bucket.at_end)
        self._collector = GradientCollector(buckets, self._send)

    @contextlib.contextmanager
    def no_sync(self, *, complete: bool = True) -> Iterator[None]:
        self._collector.holding = True
        try:
            yield
        finally:
            self._collector.holding = False

    def sync_gradients(self) -> None:
        self._collector.flush()
        collectives.advance(self._under_way)
        for pending in self._under_way:
            pending.wait()
        self._under_way = []
        for bucket in self._collector.buckets:
            bucket.hand_over()
        self._collector.begin()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._collector.close()

    def _send(self, bucket: Bucket) -> None:
        if bucket.group is not None:
            wire = bucket.narrow()
            collectives.advance(self._under_way)
            self._under_way.append(collectives.all_reduce(wire, bucket.group))
