"""Stages 1 and 2: whole weights on every rank; gradients and updates in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from femto_core.buckets import backward_order
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.precision import ParamShare, Precision
from femto_ops import collectives
from femto_zero.flat import FlatParameters, cut_by_size, kinds_of
from femto_zero.gradients import GradientShards


class WholeWeights:
    """Every rank updates its share of each bucket of parameters and gathers the others' (Rajbhandari et al. 2020, 5).

    Takes the sharding seat. Stage 1 accumulates full gradients over micro-batches; stage 2 (`every_micro_batch`)
    reduces each gradient as it appears and keeps only its shard.
    """

    def __init__(self, mesh: Mesh, axes: Sequence[str], *, every_micro_batch: bool, bucket_mib: float) -> None:
        """`axes`: the mesh axes over whose ranks gradients and updates are sharded."""
        self._mesh, self._axes = mesh, axes
        self._every_micro_batch = every_micro_batch
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._flats: list[FlatParameters] = []
        self._shares: dict[str, ParamShare] = {}
        self._gradients: GradientShards

    def allocate(self, stage: Stage, precision: Precision) -> list[ParamShare]:
        """Lay out the buckets in `backward_order`."""
        metas = dict(stage.named_parameters())
        frozen = {name for name, parameter in metas.items() if not parameter.requires_grad}
        trainable = [name for name in backward_order(stage) if name not in frozen]
        kinds = kinds_of(trainable, stage, precision, self._mesh, self._axes)
        for kind, names in kinds.items():
            sizes = [metas[name].numel() * kind.dtype.itemsize for name in names]
            for members in cut_by_size(names, sizes, self._bucket_bytes):
                self._flats.append(FlatParameters(members, stage, kind, self._mesh))
        sharded = {name: parameter for flat in self._flats for name, parameter in flat.parameters.items()}
        stage.allocate(self._mesh.device, lambda name: precision.dtype_of(name, stage), sharded)
        for flat in self._flats:
            self._shares |= flat.make_shares(stage.layouts, precision)
        for name, parameter in stage.named_parameters():
            if name in frozen:  # nobody updates it, and sharding the weights themselves is stage 3's
                self._shares[name] = precision.make_share(name, parameter, stage.layouts[name])
        groups = {kind.axes: self._mesh.group(*kind.axes) for kind in kinds}
        self._gradients = GradientShards(
            self._flats, self._mesh, precision, groups, every_micro_batch=self._every_micro_batch
        )
        return [self._shares[name] for name in metas]

    def no_sync(self, *, complete: bool = True) -> contextlib.AbstractContextManager[None]:
        return self._gradients.no_sync(complete=complete)

    def finish_gradients(self) -> None:
        self._gradients.sync()
        self._gradients.hand_over(self._shares)

    def weights_changed(self) -> None:
        for pending in [collectives.all_gather(flat.whole, flat.group) for flat in self._flats]:
            pending.wait()

    def post_step(self) -> None:
        pass

    def close(self) -> None:
        self._gradients.close()
        self._flats, self._shares = [], {}
