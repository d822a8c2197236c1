"""Stages 1 and 2: whole weights on every rank; gradients and updates in shards."""

from __future__ import annotations

import contextlib

from femto_core.buckets import backward_order
from femto_core.mesh import DP, Mesh
from femto_core.model import Stage
from femto_core.precision import MixedPrecisionManager, ParamGroup
from femto_ops import collectives
from femto_zero.flat import FlatParameters, cut_by_size, kinds_of
from femto_zero.gradients import GradientShards, Stateless


class WholeWeights(Stateless):
    """Every rank updates its share of each bucket of parameters and gathers the others' (Rajbhandari et al. 2020, 5).

    Sits in the sharding seat and in that of gradient synchronisation. Stage 1 accumulates full gradients over
    micro-batches; stage 2 (`every_micro_batch`) reduces each as it appears and keeps only its shard.
    """

    def __init__(self, mesh: Mesh, *, every_micro_batch: bool, bucket_mib: float) -> None:
        self._mesh = mesh
        self._every_micro_batch = every_micro_batch
        self._bucket_bytes = int(bucket_mib * 2**20)
        self._flats: list[FlatParameters] = []
        self._groups: dict[str, ParamGroup] = {}
        self._gradients: GradientShards

    def make_master(self, stage: Stage, precision: MixedPrecisionManager) -> list[ParamGroup]:
        """Lay out the buckets in `backward_order`."""
        metas = dict(stage.named_parameters())
        frozen = {name for name, parameter in metas.items() if not parameter.requires_grad}
        trainable = [name for name in backward_order(stage) if name not in frozen]
        group = self._mesh.group(DP)
        for kind, names in kinds_of(trainable, stage, precision, self._mesh).items():
            sizes = [metas[name].numel() * kind.dtype.itemsize for name in names]
            for members in cut_by_size(names, sizes, self._bucket_bytes):
                self._flats.append(FlatParameters(members, stage, kind, group, self._mesh.device))
        sharded = {name: parameter for flat in self._flats for name, parameter in flat.parameters.items()}
        stage.allocate(self._mesh.device, lambda name: precision.dtype_of(name, stage), sharded)
        for flat in self._flats:
            self._groups |= flat.make_groups(stage.layouts, precision)
        for name, parameter in stage.named_parameters():
            if name in frozen:  # nobody updates it: only the weight itself could be sharded, and this is stage 3's
                self._groups[name] = precision.make_group(name, parameter, stage.layouts[name])
        self._gradients = GradientShards(
            self._flats, self._mesh, precision, every_micro_batch=self._every_micro_batch, group=group
        )
        return [self._groups[name] for name in metas]

    def attach(self, stage: Stage, precision: MixedPrecisionManager) -> None:
        pass

    def no_sync(self, *, complete: bool = True) -> contextlib.AbstractContextManager[None]:
        return self._gradients.no_sync(complete=complete)

    def sync_gradients(self) -> None:
        self._gradients.sync()

    def reduce_grads(self) -> None:
        self._gradients.hand_over(self._groups)

    def gather_weights(self) -> None:
        for pending in [collectives.all_gather(flat.whole, flat.group) for flat in self._flats]:
            pending.wait()

    def post_step(self) -> None:
        pass

    def close(self) -> None:
        self._gradients.close()
        self._flats, self._groups = [], {}
