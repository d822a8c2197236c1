"""Stage 3: weights, gradients and updates in shards; a unit's weights are whole only while it computes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from femto_core.buckets import backward_order
from femto_core.mesh import DP, Mesh
from femto_core.model import Stage
from femto_core.precision import MixedPrecisionManager, ParamGroup
from femto_zero.flat import FlatParameters, cut_by_size, kinds_of
from femto_zero.gradients import GradientShards, Stateless
from femto_zero.units import Place, Unit, plan_units

WORTH_CUTTING = 2**22
"""Elements: a smaller unit's gradients are not worth a message more."""


class ShardedWeights(Stateless):
    """Gathers each unit ahead of its use and drops it after (Rajbhandari et al. 2020, 5.3; Zhao et al. 2023, 3 and 4).

    Sits in the sharding seat and in that of gradient synchronisation. Module hooks see a unit's forward come and go. A
    hook on its outputs sees its backward come; it is over when the next unit's comes, or the micro-batch's ends.
    """

    def __init__(self, mesh: Mesh, *, every_micro_batch: bool, prefetch: int, reshard_after_forward: bool) -> None:
        """`prefetch`: how many units to gather ahead of the one that computes."""
        self._mesh = mesh
        self._every_micro_batch = every_micro_batch
        self._prefetch = prefetch
        self._reshard_after_forward = reshard_after_forward
        self._units: list[Unit] = []
        self._places: list[Place] = []
        self._first: dict[Unit, int] = {}
        self._last: dict[Unit, int] = {}
        """At which places a unit is used first and last."""
        self._in_backward: tuple[Unit, ...] = ()
        self._groups: dict[str, ParamGroup] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._gradients: GradientShards

    def make_master(self, stage: Stage, precision: MixedPrecisionManager) -> list[ParamGroup]:
        metas = dict(stage.named_parameters())
        group, device = self._mesh.group(DP), self._mesh.device
        plans, uses = plan_units(stage)
        order = backward_order(stage)
        units: dict[str, Unit] = {}
        for name, parameters in plans.items():
            flats = [
                FlatParameters(run, stage, kind, group, device)
                for kind, members in kinds_of(
                    [name for name in order if name in parameters], stage, precision, self._mesh
                ).items()
                for run in halves(members, metas)
            ]
            units[name] = Unit(name, flats)
        self._units = list(units.values())
        flats = [flat for unit in self._units for flat in unit.flats]
        sharded = {name: parameter for flat in flats for name, parameter in flat.parameters.items()}
        if missing := sorted(set(metas) - set(sharded)):
            raise RuntimeError(f"no unit has the parameter {missing[0]}")
        stage.allocate(device, lambda name: precision.dtype_of(name, stage), sharded)
        for flat in flats:
            self._groups |= flat.make_groups(stage.layouts, precision)
        self._places = [
            Place(number, module, tuple(units[n] for n in names), looks_up=module is stage.body.embed_tokens)
            for number, (module, names) in enumerate(uses)
        ]
        for place in self._places:
            for unit in place.units:
                self._first.setdefault(unit, place.number)
                self._last[unit] = place.number
            self._watch(place)
        trainable = [flat for unit in reversed(self._units) for flat in unit.flats if flat.kind.trainable]
        # Ranks that use different parameters reduce and gather in different orders: two groups keep them apart.
        reductions = self._mesh.another_group(DP) if self._mesh.size(DP) > 1 else group
        self._gradients = GradientShards(
            trainable, self._mesh, precision, every_micro_batch=self._every_micro_batch, group=reductions
        )
        return [self._groups[name] for name in metas]

    def attach(self, stage: Stage, precision: MixedPrecisionManager) -> None:
        pass

    @contextlib.contextmanager
    def no_sync(self, *, complete: bool = True) -> Iterator[None]:
        with self._gradients.no_sync(complete=complete):
            yield
        self._end_backward()

    def sync_gradients(self) -> None:
        self._gradients.sync()
        self._end_backward()

    def reduce_grads(self) -> None:
        self._gradients.hand_over(self._groups)

    def gather_weights(self) -> None:
        self._release()  # what is gathered is out of date; the next forward gathers anew

    def post_step(self) -> None:
        self._release()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._gradients.close()
        self._handles, self._units, self._places, self._in_backward = [], [], [], ()
        self._groups, self._first, self._last = {}, {}, {}

    def _watch(self, place: Place) -> None:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(_module: nn.Module, _inputs: Any) -> None:
            self._before_forward(place)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._after_forward(place, outputs)

        self._handles += [place.module.register_forward_pre_hook(before), place.module.register_forward_hook(after)]

    def _before_forward(self, place: Place) -> None:
        for unit in place.units:
            unit.gather()
        if not _in_backward():  # recomputation goes its own way
            self._gather_ahead(place, self._places[place.number + 1 :])

    def _after_forward(self, place: Place, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._expect_backward(place, [t for t in _tensors(outputs) if t.is_floating_point()])
        if _in_backward():
            return  # the backward of what was recomputed is about to come, and releases
        # The last place's backward comes next, so its units stay.
        stay = not self._reshard_after_forward or place is self._places[-1]
        if not (stay and place.in_backward and torch.is_grad_enabled()):
            for unit in place.units:
                if self._last[unit] == place.number:
                    unit.release()

    def _expect_backward(self, place: Place, outputs: list[torch.Tensor]) -> None:
        if any(unit.trainable for unit in place.units) and not any(tensor.requires_grad for tensor in outputs):
            # This rank did not use what is trained here, and nothing before it. Others may have, and their backward
            # comes as far as this: ours must too, for the gathers on the way.
            for tensor in outputs:
                tensor.requires_grad_()
        reached = [tensor for tensor in outputs if tensor.requires_grad]
        place.in_backward = bool(reached) and not place.looks_up
        if place.in_backward:
            for tensor in reached:
                tensor.register_hook(lambda _: self._before_backward(place))  # type: ignore[no-untyped-call]

    def _before_backward(self, place: Place) -> None:
        for unit in self._in_backward:
            if unit not in place.units:
                # A rank that did not use all of it must not keep others waiting for sums while it waits for weights.
                # One that is also used earlier in forward has backward yet to come: a tied embedding, after the head.
                if self._first[unit] > place.number:
                    self._gradients.finish(unit.flats)
                unit.release()
        self._in_backward = place.units
        for unit in place.units:
            unit.gather()
        self._gather_ahead(place, [p for p in reversed(self._places[: place.number]) if p.in_backward])

    def _gather_ahead(self, place: Place, coming: Sequence[Place]) -> None:
        """Begin to gather the next units that the places `coming` use."""
        units = dict.fromkeys(unit for other in coming for unit in other.units if unit not in place.units)
        for unit in itertools.islice(units, self._prefetch):
            unit.start_gather()

    def _end_backward(self) -> None:
        self._release()  # a recomputation may have gathered some that backward never came to
        self._in_backward = ()

    def _release(self) -> None:
        for unit in self._units:
            unit.release()


def halves(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Cut a large unit into vectors of half its size at most: half its gradients can go while half are to come."""
    sizes = [parameters[name].numel() for name in names]
    return [list(names)] if sum(sizes) < WORTH_CUTTING else cut_by_size(names, sizes, sum(sizes) / 2)


def _in_backward() -> bool:
    """Tell whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    return [t for output in outputs for t in _tensors(output)] if isinstance(outputs, tuple | list) else []
