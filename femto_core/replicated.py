"""No sharding: every rank keeps and updates all of its stage, and gradients are summed by all-reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from femto_core.buckets import Bucket, GradientCollector, backward_order
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.precision import ParamShare, Precision
from femto_ops import collectives
from femto_ops.collectives import Pending


class Replicated:
    """Takes the sharding seat by default."""

    def __init__(self, mesh: Mesh, bucket_mib: float) -> None:
        """`bucket_mib`: MiB of gradients that are sent at a time."""
        self._mesh = mesh
        self._gradients: AllReduce | LocalSums = AllReduce(mesh, bucket_mib) if mesh.world_size > 1 else LocalSums()

    def allocate(self, stage: Stage, precision: Precision) -> list[ParamShare]:
        stage.allocate(self._mesh.device, lambda name: precision.dtype_of(name, stage))
        self._gradients.attach(stage, precision)
        return [precision.make_share(name, p, stage.layouts[name]) for name, p in stage.named_parameters()]

    def no_sync(self, *, complete: bool = True) -> contextlib.AbstractContextManager[None]:
        return self._gradients.no_sync()

    def finish_gradients(self) -> None:
        self._gradients.finish()

    def weights_changed(self) -> None:
        pass

    def post_step(self) -> None:
        pass

    def close(self) -> None:
        self._gradients.close()


class LocalSums:
    """For a world of one rank, which has seen all the data: gradients add up where autograd puts them."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def attach(self, stage: Stage, precision: Precision) -> None:
        """Have gradients add up in the precision's dtype."""
        self._parameters = [p for _, p in stage.named_parameters() if p.requires_grad]
        for parameter in self._parameters:
            parameter.grad_dtype = precision.accumulate_dtype(parameter.dtype)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there is nothing to send."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Give parameters that were not used a gradient of zero."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

    def close(self) -> None:
        """Forget the parameters."""
        self._parameters = []


class AllReduce:
    """Sums gradients in buckets, each sent as soon as it is full while backward goes on (Li et al. 2020, 3.2).

    From its first micro-batch on, a gradient is collected in its bucket, in the precision's dtype for sums. So there is
    one copy of all gradients.
    """

    def __init__(self, mesh: Mesh, bucket_mib: float) -> None:
        self._mesh = mesh
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._collector = GradientCollector([], self._send)
        self._in_flight: list[Pending] = []

    def attach(self, stage: Stage, precision: Precision) -> None:
        """Lay out the buckets in `backward_order` and start to watch the stage's parameters."""
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
                    at_end=not {*axes} <= {*self._mesh.data_axes},
                )
            )

        parameters = dict(stage.named_parameters())
        for name in backward_order(stage):
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            key = (stage.layouts[name].sums_over(self._mesh), parameter.dtype)
            members = open_buckets.setdefault(key, [])
            size = sum(p.numel() for p in members) * parameter.element_size()
            if members and size + parameter.numel() * parameter.element_size() > self._bucket_bytes:
                close_bucket(key[0], open_buckets.pop(key))
                members = open_buckets.setdefault(key, [])
            members.append(parameter)
        for (axes, _), members in open_buckets.items():
            close_bucket(axes, members)
        buckets.sort(key=lambda bucket: bucket.at_end)
        self._collector = GradientCollector(buckets, self._send)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collect gradients inside, and send nothing."""
        self._collector.holding = True
        try:
            yield
        finally:
            self._collector.holding = False

    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and make each parameter's `grad` its part of them."""
        self._collector.flush()
        collectives.advance(self._in_flight)
        for pending in self._in_flight:
            pending.wait()
        self._in_flight = []
        for bucket in self._collector.buckets:
            bucket.hand_over()
        self._collector.begin()

    def close(self) -> None:
        """Stop watching the parameters."""
        self._collector.close()

    def _send(self, bucket: Bucket) -> None:
        if bucket.group is not None:
            wire = bucket.narrow()
            collectives.advance(self._in_flight)
            self._in_flight.append(collectives.all_reduce(wire, bucket.group))
