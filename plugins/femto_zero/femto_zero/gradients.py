"""Gradients reduced to shards: each bucket goes to its owners as soon as backward has filled it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from femto_core.buckets import Bucket, GradientCollector
from femto_core.mesh import Mesh
from femto_core.precision import ParamShare, Precision
from femto_ops import collectives
from femto_ops.collectives import Pending
from femto_zero.flat import FlatParameters

IN_FLIGHT = 1
"""Buckets in flight at a time: each has as long as the next takes to fill. More would only hold memory."""


class GradientShards:
    """Sums the gradients of flat parameters over ranks, and keeps of each sum the share that this rank owns.

    With `every_micro_batch`, full gradients are reduced and freed after each backward, and shards add up (stages 2 and
    3); otherwise full gradients add up and are reduced in the last micro-batch's backward (stage 1). Sums over
    micro-batches are in the precision seat's `accumulate_dtype` either way.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        mesh: Mesh,
        precision: Precision,
        groups: Mapping[tuple[str, ...], dist.ProcessGroup],
        *,
        every_micro_batch: bool,
    ) -> None:
        """`groups`: the process group to reduce in, for the axes of each kind of parameters."""
        self._mesh, self._every = mesh, every_micro_batch
        self._precision = precision
        self._flats: dict[Bucket, FlatParameters] = {}
        for flat in flats:
            wire = precision.reduce_dtype(flat.kind.dtype)
            sums = precision.accumulate_dtype(flat.kind.dtype)
            bucket = Bucket(list(flat.parameters.values()), dtype=sums, wire_dtype=wire, group=groups[flat.kind.axes])
            self._flats[bucket] = flat
        self._collector = GradientCollector(list(self._flats), self._send)
        self._in_flight: list[tuple[Bucket, torch.Tensor, Pending]] = []
        self._shares: dict[Bucket, torch.Tensor] = {}

    @contextlib.contextmanager
    def no_sync(self, *, complete: bool = True) -> Iterator[None]:
        """Wrap the backward of every micro-batch except the last; `complete`: all its gradients are computed in it."""
        if self._every and complete:
            yield
            self._finish_backward()
            return
        self._collector.holding = True
        try:
            yield
        finally:
            self._collector.holding = False

    def sync(self) -> None:
        """After the last backward: wait for every share, and sum it over the further axes."""
        self._finish_backward()
        while self._in_flight:
            self._land()
        for bucket, share in self._shares.items():
            self._mesh.sum(share, *self._flats[bucket].kind.partial)

    def hand_over(self, shares: dict[str, ParamShare]) -> None:
        """Make each share's `compute.grad` its part of the sums, which the next step begins anew."""
        for bucket, share in self._shares.items():
            flat = self._flats[bucket]
            parts = flat.flat_layout.cut_share(share, flat.group.rank())
            for name, part in zip(flat.names, parts, strict=True):
                compute = shares[name].compute
                if compute.grad_dtype != part.dtype:
                    compute.grad_dtype = part.dtype
                compute.grad = part
        self._shares = {}

    def finish(self, flats: Sequence[FlatParameters]) -> None:
        """Reduce the gradients of these parameters, used or not: on every rank, backward is past them."""
        self._collector.finish([bucket for bucket, flat in self._flats.items() if flat in flats])

    def close(self) -> None:
        """Stop watching the parameters."""
        self._collector.close()
        self._flats, self._shares, self._in_flight = {}, {}, []

    def _finish_backward(self) -> None:
        self._collector.flush()
        self._collector.begin()

    def _send(self, bucket: Bucket) -> None:
        whole = bucket.narrow()
        bucket.release()  # `whole` lives until it is sent, but no longer
        if len(self._in_flight) == IN_FLIGHT:
            self._land()
        assert bucket.group is not None
        share = torch.empty(bucket.flat_layout.share_numel, dtype=bucket.wire_dtype, device=whole.device)
        self._in_flight.append((bucket, share, collectives.reduce_scatter(whole, share, bucket.group)))

    def _land(self) -> None:
        bucket, share, pending = self._in_flight.pop(0)
        pending.wait()
        del pending  # and with it the whole gradients, before the sums are widened
        if bucket in self._shares:  # from the second micro-batch on in the dtype of sums
            wide = torch.promote_types(share.dtype, self._precision.accumulate_dtype(self._flats[bucket].kind.dtype))
            share = self._shares[bucket].to(wide).add_(share)
        self._shares[bucket] = share
