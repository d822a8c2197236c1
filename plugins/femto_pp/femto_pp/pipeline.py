"""The executor: cuts the model into stages, and does what a schedule says, whichever schedule it is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from femto_core.batch import Batch
from femto_core.loss import Loss
from femto_core.mesh import Mesh
from femto_core.model import FullModel, Stage
from femto_core.sync import GradientSynchronizer
from femto_ops.deferral import Later
from femto_pp.actions import (
    Action,
    Backward,
    Compute,
    Forward,
    RecvBackward,
    RecvForward,
    SendForward,
    Step,
    receive_of,
    send_of,
)
from femto_pp.links import PP, Links
from femto_pp.lowering import channel_of, lower, source_of
from femto_pp.partition import divide
from femto_pp.placement import Placement
from femto_pp.schedules import Schedule
from femto_pp.simulate import needed, simulate

TIED = "pp_tied"
"""The ranks that hold the two copies of a tied weight, as an axis of the mesh."""
Place = tuple[int, int]
"""(micro-batch, chunk)."""


@attrs.define
class Run:
    """What lies between the actions of one step."""

    batches: list[Batch]
    grad_sync: GradientSynchronizer
    loss: Loss
    scale: torch.Tensor
    last: Compute
    """The action after which no gradient comes any more."""
    total: torch.Tensor
    heard: int = 0
    """How many steps' receives have been started."""
    arriving: dict[Action, tuple[dist.Work, torch.Tensor]] = attrs.field(factory=dict)
    inputs: dict[Place, torch.Tensor] = attrs.field(factory=dict)
    roots: dict[Place, GradientEdge] = attrs.field(factory=dict)
    results: dict[Action, torch.Tensor] = attrs.field(factory=dict)
    """What is to be sent, or handed to this rank's next chunk."""
    put_off: dict[Place, Later] = attrs.field(factory=dict)


class Pipeline:
    """Takes the schedule seat."""

    def __init__(self, mesh: Mesh, placement: Placement, schedule: Schedule, layers: str) -> None:
        """`layers`: even, balanced, or how many layers each stage has."""
        self._mesh, self._placement, self._schedule, self._layers = mesh, placement, schedule, layers
        self._rank = mesh.coordinate(PP)
        self._links = Links(mesh, placement)
        self._width = 0
        self._plan = functools.lru_cache(maxsize=8)(self._make_plan)

    def partition(self, model: FullModel) -> Stage:
        placement, rank = self._placement, self._rank
        ranges = divide(model.config, placement.stages, self._layers)
        stages = [placement.stage(rank, chunk) for chunk in range(placement.chunks)]
        stage = Stage(
            model,
            [ranges[number] for number in stages],
            frozenset(axis.name for axis in self._mesh.axes if axis.name != PP),
            first=stages[0] == 0,
            last=stages[-1] == placement.stages - 1,
        )
        self._width = model.config.hidden_size
        first, last = placement.rank(0), placement.rank(placement.stages - 1)
        if model.tied and first != last:
            self._mesh.add_axis(TIED, [[line[first], line[last]] for line in self._mesh.lines(PP)])
            for name, layout in stage.layouts.items():
                if layout.tied:
                    stage.layouts[name] = attrs.evolve(layout, partial=layout.partial | {TIED})
        return stage

    def run(
        self,
        stage: Stage,
        micro_batches: Sequence[Batch],
        loss: Loss,
        scale: torch.Tensor,
        grad_sync: GradientSynchronizer,
    ) -> torch.Tensor:
        device = self._mesh.device
        order, steps = self._plan(len(micro_batches))
        run = Run(
            batches=[batch.to(device) for batch in micro_batches],
            grad_sync=grad_sync,
            loss=loss,
            scale=scale,
            last=[action for action in order if not isinstance(action, Forward)][-1],
            total=torch.zeros((), dtype=torch.float64, device=device),
        )
        for number, step in enumerate(steps):
            if isinstance(step, Compute):
                self._listen(stage, run, steps, number)
                self._compute(stage, run, step)
            elif (outgoing := send_of(step)) is not None:
                self._send(run, outgoing)
        self._links.drain()
        return self._from_last(run.total)

    @torch.no_grad()
    def forward(
        self, stage: Stage, batch: Batch, then: Callable[[torch.Tensor, nn.Module], torch.Tensor]
    ) -> torch.Tensor:
        placement, batch = self._placement, batch.to(self._mesh.device)
        hidden = batch.input_ids
        for number in range(placement.stages):
            if placement.rank(number) != self._rank:
                continue
            action = Forward(0, placement.chunk(number))
            source = source_of(action, placement, self._rank)
            if source is not None:
                hidden = self._buffer(stage, batch)
                self._links.receive(hidden, source[0]).wait()
            hidden = stage.forward(hidden, batch, action.chunk)
            channel = channel_of(action, placement, self._rank)
            if channel is not None:
                self._links.send(hidden, channel)
        result = then(hidden, stage.head) if self._rank == self._last_rank else None
        self._links.drain()
        return self._share(result)

    def in_flight(self, micro_batches: int) -> int:
        orders = self._schedule.orders(micro_batches, self._placement)
        chunks = simulate(orders, self._placement, micro_batches).in_flight(self._rank)
        return -(-chunks // self._placement.chunks)

    def close(self) -> None:
        """End what runs beside the steps."""
        self._links.close()

    @property
    def _last_rank(self) -> int:
        return self._placement.rank(self._placement.stages - 1)

    def _make_plan(self, micro_batches: int) -> tuple[tuple[Compute, ...], list[Step]]:
        orders = self._schedule.orders(micro_batches, self._placement)
        # One that is broken would hang, or silently leave gradients out.
        simulate(orders, self._placement, micro_batches, splits=self._schedule.splits_backward)
        return orders[self._rank], lower(orders, self._placement, self._rank)

    def _listen(self, stage: Stage, run: Run, steps: Sequence[Step], number: int) -> None:
        """Start every receive up to the computation after this one, so that it runs beside this one."""
        following = range(number + 1, len(steps))
        until = next((at for at in following if isinstance(steps[at], Compute)), len(steps))
        for step in steps[run.heard : until]:
            incoming = receive_of(step)
            if incoming is not None:
                kind = Forward if isinstance(incoming, RecvForward) else Backward
                source = source_of(kind(incoming.micro_batch, incoming.chunk), self._placement, self._rank)
                assert source is not None
                buffer = self._buffer(stage, run.batches[incoming.micro_batch])
                run.arriving[incoming] = self._links.receive(buffer, source[0]), buffer
        run.heard = max(run.heard, until)

    def _compute(self, stage: Stage, run: Run, action: Compute) -> None:
        if isinstance(action, Forward):
            self._forward(stage, run, action)
            return
        # A backward whose weight gradients are put off has not given all gradients of its micro-batch.
        is_half = self._schedule.splits_backward and isinstance(action, Backward)
        with contextlib.nullcontext() if action == run.last else run.grad_sync.no_sync(complete=not is_half):
            if isinstance(action, Backward):
                self._backward(stage, run, action)
            else:
                run.put_off.pop((action.micro_batch, action.chunk)).compute()

    def _forward(self, stage: Stage, run: Run, action: Forward) -> None:
        place = action.micro_batch, action.chunk
        batch = run.batches[action.micro_batch]
        if stage.embeds(action.chunk):
            inputs = batch.input_ids
        else:
            inputs = run.inputs[place] = self._input(run, action).requires_grad_()
        hidden = stage.forward(inputs, batch, action.chunk)
        if stage.has_head(action.chunk):
            loss_sum = run.loss(hidden, stage.head, batch.targets)
            run.total += loss_sum.detach()
            hidden = loss_sum * run.scale
        else:
            run.results[action] = hidden.detach()
        if hidden.requires_grad:
            # All that backward needs: the values may go once they are sent.
            run.roots[place] = get_gradient_edge(hidden)

    def _backward(self, stage: Stage, run: Run, action: Backward) -> None:
        place = action.micro_batch, action.chunk
        grad = run.scale.new_ones(()) if stage.has_head(action.chunk) else self._input(run, action)
        root, inputs = run.roots.pop(place, None), run.inputs.pop(place, None)
        with contextlib.ExitStack() as stack:
            if self._schedule.splits_backward:
                run.put_off[place] = stack.enter_context(stage.weight_grads.put_off())
            if root is not None:
                torch.autograd.backward([root], [grad])
        if inputs is not None:
            run.results[action] = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad

    def _input(self, run: Run, action: Compute) -> torch.Tensor:
        """Return what an action starts from, once it is there: from another rank, or from this one's next chunk."""
        arrived = run.arriving.pop(
            (RecvForward if isinstance(action, Forward) else RecvBackward)(*_place(action)), None
        )
        if arrived is not None:
            work, buffer = arrived
            work.wait()
            return buffer
        (_, before) = needed(action, self._placement, self._rank)[-1]
        return run.results.pop(before)

    def _send(self, run: Run, outgoing: Action) -> None:
        action = (Forward if isinstance(outgoing, SendForward) else Backward)(*_place(outgoing))
        channel = channel_of(action, self._placement, self._rank)
        assert channel is not None
        self._links.send(run.results.pop(action), channel)

    def _buffer(self, stage: Stage, batch: Batch) -> torch.Tensor:
        """Return memory for the hidden states [b, s, h] of a batch, or their gradient."""
        dtype = next(p.dtype for _, p in stage.named_parameters() if p.dim() > 1)
        return torch.empty(*batch.input_ids.shape, self._width, dtype=dtype, device=self._mesh.device)

    def _from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's `tensor` on every rank of this pipeline."""
        if self._placement.size > 1:
            dist.broadcast(tensor, group=self._mesh.group(PP), group_src=self._last_rank)
        return tensor

    def _share(self, result: torch.Tensor | None) -> torch.Tensor:
        """Return the last stage's result, whose shape only it knows, on every rank of this pipeline."""
        if self._placement.size == 1:
            assert result is not None
            return result
        said = [None if result is None else (tuple(result.shape), result.dtype)]
        dist.broadcast_object_list(said, group=self._mesh.group(PP), group_src=self._last_rank)
        assert said[0] is not None
        shape, dtype = said[0]
        return self._from_last(torch.empty(shape, dtype=dtype, device=self._mesh.device) if result is None else result)


def _place(action: Action) -> Place:
    return action.micro_batch, action.chunk
