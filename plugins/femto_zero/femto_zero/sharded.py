"""Stage 3: weights, gradients and updates in shards; a unit's weights are whole only while it computes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from femto_core.buckets import backward_order
from femto_core.mesh import Mesh
from femto_core.model import SideLosses, Stage
from femto_core.precision import ParamShare, Precision
from femto_ops.autograd import in_backward
from femto_zero.flat import FlatParameters, cut_by_size, kinds_of
from femto_zero.gradients import GradientShards
from femto_zero.units import ModuleUse, Unit, chunk_of, plan_units

WORTH_CUTTING = 2**22
"""Elements: the gradients of a smaller unit are not worth a second message."""


class ShardedWeights:
    """Gathers each unit ahead of its use and drops it after (Rajbhandari et al. 2020, 5.3; Zhao et al. 2023, 3 and 4).

    Takes the sharding seat. Module hooks see a unit's forward begin and end. A hook on its outputs sees its backward
    begin; it is over when the next unit's begins, or when the micro-batch's backward ends.
    """

    def __init__(
        self, mesh: Mesh, axes: Sequence[str], *, every_micro_batch: bool, prefetch: int, reshard_after_forward: bool
    ) -> None:
        """`axes`: the mesh axes to shard over. `prefetch`: how many units to gather ahead of the computing one."""
        self._mesh, self._axes = mesh, axes
        self._every_micro_batch = every_micro_batch
        self._prefetch = prefetch
        self._reshard_after_forward = reshard_after_forward
        self._units: list[Unit] = []
        self._uses: list[ModuleUse] = []
        self._first: dict[Unit, int] = {}
        self._last: dict[Unit, int] = {}
        """The numbers of a unit's first and last use in forward."""
        self._in_backward: tuple[Unit, ...] = ()
        self._shares: dict[str, ParamShare] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._gradients: GradientShards
        self._side_losses: SideLosses

    def allocate(self, stage: Stage, precision: Precision) -> list[ParamShare]:
        metas = dict(stage.named_parameters())
        plans, uses = plan_units(stage)
        units = self._make_units(plans, stage, precision)
        flats = [flat for unit in self._units for flat in unit.flats]
        sharded = {name: parameter for flat in flats for name, parameter in flat.parameters.items()}
        if missing := sorted(set(metas) - set(sharded)):
            raise RuntimeError(f"no unit has the parameter {missing[0]}")
        stage.allocate(self._mesh.device, lambda name: precision.dtype_of(name, stage), sharded)
        for flat in flats:
            self._shares |= flat.make_shares(stage.layouts, precision)
        self._watch_all(stage, units, uses)
        trainable = [flat for unit in reversed(self._units) for flat in unit.flats if flat.kind.trainable]
        self._gradients = GradientShards(
            trainable, self._mesh, precision, self._reduction_groups(), every_micro_batch=self._every_micro_batch
        )
        return [self._shares[name] for name in metas]

    def _make_units(self, plans: Mapping[str, Sequence[str]], stage: Stage, precision: Precision) -> dict[str, Unit]:
        metas, order = dict(stage.named_parameters()), backward_order(stage)
        units: dict[str, Unit] = {}
        for unit, parameters in plans.items():
            names = [name for name in order if name in parameters]
            kinds = kinds_of(names, stage, precision, self._mesh, self._axes)
            flats = [
                FlatParameters(run, stage, kind, self._mesh)
                for kind, members in kinds.items()
                for run in halves(members, metas)
            ]
            units[unit] = Unit(unit, flats)
        self._units = list(units.values())
        return units

    def _watch_all(
        self, stage: Stage, units: Mapping[str, Unit], uses: Sequence[tuple[nn.Module, Sequence[str]]]
    ) -> None:
        self._side_losses = stage.side_losses
        self._uses = [
            ModuleUse(
                number=number,
                chunk=chunk_of(stage, module),
                module=module,
                units=tuple(units[name] for name in names),
                looks_up=module is stage.body.embed_tokens,
            )
            for number, (module, names) in enumerate(uses)
        ]
        for use in self._uses:
            for unit in use.units:
                self._first.setdefault(unit, use.number)
                self._last[unit] = use.number
            self._watch(use)

    def _reduction_groups(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """Return groups for reductions, apart from those for gathers.

        Ranks that use different parameters reduce and gather in different orders. Every rank makes a group for every
        subset of the axes, whatever parameters it has.
        """
        mesh, axes = self._mesh, self._axes
        subsets = [over for n in range(1, len(axes) + 1) for over in itertools.combinations(axes, n)]
        return {over: mesh.another_group(*over) if mesh.size(*over) > 1 else mesh.group(*over) for over in subsets}

    @contextlib.contextmanager
    def no_sync(self, *, complete: bool = True) -> Iterator[None]:
        with self._gradients.no_sync(complete=complete):
            yield
        self._end_backward()

    def finish_gradients(self) -> None:
        self._gradients.sync()
        self._end_backward()
        self._gradients.hand_over(self._shares)

    def weights_changed(self) -> None:
        self._release()  # what is gathered is out of date; the next forward gathers anew

    def post_step(self) -> None:
        self._release()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients.close()
        self._handles, self._units, self._uses, self._in_backward = [], [], [], ()
        self._shares, self._first, self._last = {}, {}, {}

    def _watch(self, use: ModuleUse) -> None:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(_module: nn.Module, _inputs: Any) -> None:
            self._before_forward(use)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._after_forward(use, outputs)

        self._handles += [use.module.register_forward_pre_hook(before), use.module.register_forward_hook(after)]

    def _before_forward(self, use: ModuleUse) -> None:
        for unit in use.units:
            unit.gather()
        if not in_backward():  # recomputation has an order of its own
            use.side_before = self._side_losses.total
            self._gather_ahead(use, self._uses[use.number + 1 :])

    def _after_forward(self, use: ModuleUse, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._expect_backward(use, [t for t in _tensors(outputs) if t.is_floating_point()])
        if in_backward():
            return  # the recomputed module's backward comes next, and releases
        # Backward begins with the last use, so its units stay.
        stay = not self._reshard_after_forward or use is self._uses[-1]
        if not (stay and use.in_backward and torch.is_grad_enabled()):
            for unit in use.units:
                if self._last[unit] == use.number:
                    unit.release()

    def _expect_backward(self, use: ModuleUse, outputs: list[torch.Tensor]) -> None:
        if any(unit.trainable for unit in use.units) and not any(tensor.requires_grad for tensor in outputs):
            # No trainable parameter here or earlier was used on this rank, so its backward would stop short. Other
            # ranks' may not; this rank's must reach this module too, so that all ranks join the same all-gathers.
            for tensor in outputs:
                tensor.requires_grad_()
        # The gradient of a side loss may enter this unit before that of the outputs does.
        side, before, use.side_before = self._side_losses.total, use.side_before, None
        sources = outputs if side is None or side is before else [*outputs, side]
        reached = [tensor for tensor in sources if tensor.requires_grad]
        use.in_backward = bool(reached) and not use.looks_up
        if use.in_backward:
            for tensor in reached:
                tensor.register_hook(lambda _: self._before_backward(use))  # type: ignore[no-untyped-call]

    def _before_backward(self, use: ModuleUse) -> None:
        for unit in self._in_backward:
            if unit not in use.units:
                # Reduce this unit now even if some parameters got no gradient, or another rank would wait in
                # reduce-scatter while this one waits in all-gather. A unit that is used again earlier in forward (a
                # tied embedding) still has gradients to come.
                if self._first[unit] > use.number:
                    self._gradients.finish(unit.flats)
                unit.release()
        self._in_backward = use.units
        for unit in use.units:
            unit.gather()
        self._gather_ahead(use, [p for p in reversed(self._uses[: use.number]) if p.in_backward])

    def _gather_ahead(self, use: ModuleUse, coming: Sequence[ModuleUse]) -> None:
        """Begin to gather the next units that `coming` need, within this chunk: which chunk follows is not known."""
        within = [other for other in coming if other.chunk == use.chunk]
        units = dict.fromkeys(unit for other in within for unit in other.units if unit not in use.units)
        for unit in itertools.islice(units, self._prefetch):
            unit.start_gather()

    def _end_backward(self) -> None:
        self._release()  # a recomputation may have gathered units that backward did not reach
        self._in_backward = ()

    def _release(self) -> None:
        for unit in self._units:
            unit.release()


def halves(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Cut a large unit into vectors of at most half its size, so that half its gradients travel while half are made."""
    sizes = [parameters[name].numel() for name in names]
    return [list(names)] if sum(sizes) < WORTH_CUTTING else cut_by_size(names, sizes, sum(sizes) / 2)


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    return [t for output in outputs for t in _tensors(output)] if isinstance(outputs, tuple | list) else []
