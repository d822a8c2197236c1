"""Gradients reduced to shards: each bucket goes to its owners as soon as backward has filled it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from femto_core.buckets import Bucket, GradientCollector
from femto_core.mesh import Mesh
from femto_core.precision import MixedPrecisionManager, ParamGroup
from femto_ops import collectives
from femto_ops.collectives import Pending
from femto_zero.flat import FlatParameters

IN_FLIGHT = 1
"""Buckets under way at a time: each has as long as the next takes to fill. More would only hold memory."""


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
        precision: MixedPrecisionManager,
        *,
        every_micro_batch: bool,
        group: dist.ProcessGroup,
    ) -> None:
        self._mesh, self._every = mesh, every_micro_batch
        self._precision = precision
        self._flats: dict[Bucket, FlatParameters] = {}
        for flat in flats:
            wire = precision.reduce_dtype(flat.kind.dtype)
            sums = precision.accumulate_dtype(flat.kind.dtype)
            bucket = Bucket(list(flat.parameters.values()), dtype=sums, wire_dtype=wire, group=group)
            self._flats[bucket] = flat
        self._collector = GradientCollector(list(self._flats), self._send)
        self._under_way: list[tuple[Bucket, torch.Tensor, Pending]] = []
        self._shares: dict[Bucket, torch.Tensor] = {}

    @contextlib.contextmanager
    def no_sync(self, *, complete: bool = True) -> Iterator[None]:
        """Around the backward of every micro-batch but the last; `complete`: after it, all its gradients are there."""
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
        """After the last backward: have every share complete."""
        self._finish_backward()
        while self._under_way:
            self._land()
        for bucket, share in self._shares.items():
            self._mesh.sum(share, *self._flats[bucket].kind.partial)

    def hand_over(self, groups: dict[str, ParamGroup]) -> None:
        """Make each group's `compute.grad` its part of the shares, which the next step begins anew."""
        for bucket, share in self._shares.items():
            flat = self._flats[bucket]
            parts = flat.packing.cut_share(share, flat.group.rank())
            for name, part in zip(flat.names, parts, strict=True):
                compute = groups[name].compute
                if compute.grad_dtype != part.dtype:
                    compute.grad_dtype = part.dtype
                compute.grad = part
        self._shares = {}

    def finish(self, flats: Sequence[FlatParameters]) -> None:
        """Backward is past these parameters, on every rank: reduce their gradients, used or not."""
        self._collector.finish([bucket for bucket, flat in self._flats.items() if flat in flats])

    def close(self) -> None:
        """Stop watching the parameters."""
        self._collector.close()
        self._flats, self._shares, self._under_way = {}, {}, []

    def _finish_backward(self) -> None:
        self._collector.flush()
        self._collector.begin()

    def _send(self, bucket: Bucket) -> None:
        whole = bucket.narrow()
        bucket.release()  # alive until it has arrived, but no longer
        if len(self._under_way) == IN_FLIGHT:
            self._land()
        assert bucket.group is not None
        share = torch.empty(bucket.packing.share_numel, dtype=bucket.wire_dtype, device=whole.device)
        self._under_way.append((bucket, share, collectives.reduce_scatter(whole, share, bucket.group)))

    def _land(self) -> None:
        bucket, share, pending = self._under_way.pop(0)
        pending.wait()
        del pending  # and with it the whole gradients, before sums widen
        if bucket in self._shares:  # from the second on in the dtype of sums
            wide = torch.promote_types(share.dtype, self._precision.accumulate_dtype(self._flats[bucket].kind.dtype))
            share = self._shares[bucket].to(wide).add_(share)
        self._shares[bucket] = share


class Stateless:
    """The half of a synchroniser that a checkpoint asks: there is nothing between two steps."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
