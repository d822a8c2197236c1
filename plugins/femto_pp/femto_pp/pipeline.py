"""The executor: cuts a rank's chunks out of the model and runs the actions of any schedule."""

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
from femto_core.loss import BatchLoss
from femto_core.mesh import Mesh
from femto_core.model import FullModel, Stage
from femto_core.sharding import ShardingStrategy
from femto_ops.deferral import DeferredGradients
from femto_pp.actions import Action, Backward, Compute, Forward, Recv, Send
from femto_pp.links import PP, Links
from femto_pp.lowering import channel_from, channel_of, channel_to, lower, producer
from femto_pp.partition import divide
from femto_pp.placement import Placement
from femto_pp.schedules import Place, RegisteredSchedule
from femto_pp.simulate import simulate

TIED = "pp_tied"
"""The mesh axis of the two ranks that hold a copy of a tied weight."""


@attrs.define
class Run:
    """The state of one training step between a rank's actions."""

    batches: list[Batch]
    sharding: ShardingStrategy
    loss: BatchLoss
    scale: torch.Tensor
    last: Compute
    """The last action that computes gradients."""
    total: torch.Tensor
    """The summed loss so far: the head's on its rank, and the side losses of the layers on each."""
    started: int = 0
    """The number of actions whose receives, if any, have been started."""
    arriving: dict[Compute, tuple[dist.Work, torch.Tensor]] = attrs.field(factory=dict)
    """The receives in flight, with their buffers, by the computation that needs them."""
    inputs: dict[Place, torch.Tensor] = attrs.field(factory=dict)
    """The hidden states [b, s, h] that a chunk's forward began with, until its backward."""
    roots: dict[Place, list[tuple[GradientEdge, bool]]] = attrs.field(factory=dict)
    """Where in the autograd graph a chunk's backward begins, and whether there is a loss: its gradient is 1."""
    results: dict[Compute, torch.Tensor] = attrs.field(factory=dict)
    """Results that wait to be sent, or to be used by this rank's next chunk."""
    deferred: dict[Place, DeferredGradients] = attrs.field(factory=dict)
    """The weight gradients that a chunk's backward deferred."""


class Pipeline:
    """The executor of a pipeline schedule, in the schedule seat."""

    def __init__(self, mesh: Mesh, placement: Placement, schedule: RegisteredSchedule, layers: str) -> None:
        """`layers`: even, balanced, or the number of layers of each virtual stage."""
        self._mesh, self._placement, self._schedule, self._layers = mesh, placement, schedule, layers
        self._rank = mesh.coordinate(PP)
        self._links = Links(mesh, placement)
        self._width = 0
        self._plan = functools.lru_cache(maxsize=8)(self._make_plan)

    def partition(self, model: FullModel) -> Stage:
        placement, rank = self._placement, self._rank
        ranges = divide(model.config, placement.virtual_stages, self._layers)
        mine = placement.table[rank]
        stage = Stage(
            model,
            [ranges[virtual_stage] for virtual_stage in mine],
            self._mesh,
            frozenset(axis.name for axis in self._mesh.axes if axis.name != PP),
            first=mine[0] == 0,
            last=mine[-1] == placement.virtual_stages - 1,
        )
        self._width = model.config.hidden_size
        first, last = placement.rank(0), self._last_rank
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
        loss: BatchLoss,
        scale: torch.Tensor,
        sharding: ShardingStrategy,
    ) -> torch.Tensor:
        device = self._mesh.device
        order, actions = self._plan(len(micro_batches))
        run = Run(
            batches=[batch.to(device) for batch in micro_batches],
            sharding=sharding,
            loss=loss,
            scale=scale,
            last=[action for action in order if not isinstance(action, Forward)][-1],
            total=torch.zeros((), dtype=torch.float64, device=device),
        )
        for number, action in enumerate(actions):
            if isinstance(action, Compute):
                self._start_receives(stage, run, actions, number)
                self._compute(stage, run, action)
            elif isinstance(action, Send):
                # No name is bound to the result, so that its memory is freed once it is sent.
                self._links.send(run.results.pop(action.compute), channel_of(action, self._placement, self._rank))
        self._links.drain()
        return self._mesh.sum(run.total, PP)

    @torch.no_grad()
    def forward(
        self, stage: Stage, batch: Batch, then: Callable[[torch.Tensor, nn.Module], torch.Tensor]
    ) -> torch.Tensor:
        placement, batch = self._placement, batch.to(self._mesh.device)
        hidden = batch.input_ids
        for chunk in range(placement.chunks):
            incoming = channel_to(Forward(0, chunk), placement, self._rank)
            if incoming is not None:
                hidden = self._buffer(stage, batch)
                self._links.receive(hidden, incoming).wait()
            hidden = stage.forward(hidden, batch, chunk)
            outgoing = channel_from(Forward(0, chunk), placement, self._rank)
            if outgoing is not None:
                self._links.send(hidden, outgoing)
        result = then(hidden, stage.head) if self._rank == self._last_rank else None
        self._links.drain()
        return self._share(result)

    def in_flight(self, micro_batches: int) -> int:
        orders = self._schedule.orders(micro_batches, self._placement)
        chunks = simulate(orders, self._placement, micro_batches).in_flight(self._rank)
        return -(-chunks // self._placement.chunks)

    def close(self) -> None:
        """End the thread that waits for sends."""
        self._links.close()

    @property
    def _last_rank(self) -> int:
        """The rank that holds the head."""
        return self._placement.rank(self._placement.virtual_stages - 1)

    def _make_plan(self, micro_batches: int) -> tuple[tuple[Compute, ...], list[Action]]:
        """Return the computations of this rank, and these with sends and receives put in."""
        orders = self._schedule.orders(micro_batches, self._placement)
        # A broken schedule would hang, or silently leave gradients out. The simulator raises an error instead.
        simulate(orders, self._placement, micro_batches, splits=self._schedule.splits_backward)
        return orders[self._rank], lower(orders, self._placement, self._rank)

    def _start_receives(self, stage: Stage, run: Run, actions: Sequence[Action], number: int) -> None:
        """Start every receive up to the next computation after action `number`, so that they overlap with it."""
        following = range(number + 1, len(actions))
        until = next((at for at in following if isinstance(actions[at], Compute)), len(actions))
        for action in actions[run.started : until]:
            if isinstance(action, Recv):
                buffer = self._buffer(stage, run.batches[action.compute.micro_batch])
                work = self._links.receive(buffer, channel_of(action, self._placement, self._rank))
                run.arriving[action.compute] = work, buffer
        run.started = max(run.started, until)

    def _compute(self, stage: Stage, run: Run, action: Compute) -> None:
        if isinstance(action, Forward):
            self._forward(stage, run, action)
            return
        # After a backward that defers its weight gradients, its micro-batch's gradients are not complete.
        is_half = self._schedule.splits_backward and isinstance(action, Backward)
        with contextlib.nullcontext() if action == run.last else run.sharding.no_sync(complete=not is_half):
            if isinstance(action, Backward):
                self._backward(stage, run, action)
            else:
                run.deferred.pop((action.micro_batch, action.chunk)).compute()

    def _forward(self, stage: Stage, run: Run, action: Forward) -> None:
        place = action.micro_batch, action.chunk
        batch = run.batches[action.micro_batch]
        if stage.embeds(action.chunk):
            inputs = batch.input_ids
        else:
            inputs = run.inputs[place] = self._input(run, action).requires_grad_()
        hidden = stage.forward(inputs, batch, action.chunk)
        loss = stage.side_losses.take()
        if stage.has_head(action.chunk):
            loss_sum = run.loss(hidden, stage.head, batch)
            loss = loss_sum if loss is None else loss_sum + loss
        else:
            run.results[action] = hidden.detach()
        # Backward needs only the graph, so the values can be freed as soon as they are sent.
        roots = run.roots[place] = []
        if not stage.has_head(action.chunk) and hidden.requires_grad:
            roots.append((get_gradient_edge(hidden), False))
        if loss is not None:
            run.total += loss.detach()
            if loss.requires_grad:
                roots.append((get_gradient_edge(loss * run.scale), True))

    def _backward(self, stage: Stage, run: Run, action: Backward) -> None:
        place = action.micro_batch, action.chunk
        one = run.scale.new_ones(())
        grad = one if stage.has_head(action.chunk) else self._input(run, action)
        roots, inputs = run.roots.pop(place), run.inputs.pop(place, None)
        with contextlib.ExitStack() as stack:
            if self._schedule.splits_backward:
                run.deferred[place] = stack.enter_context(stage.weight_grads.defer())
            if roots:
                grads = [one if is_loss else grad for _, is_loss in roots]
                torch.autograd.backward([edge for edge, _ in roots], grads)
        if inputs is not None:
            run.results[action] = torch.zeros_like(inputs) if inputs.grad is None else inputs.grad

    def _input(self, run: Run, action: Compute) -> torch.Tensor:
        """Wait for an action's input and return it: received, or the result of this rank's neighbouring chunk."""
        arriving = run.arriving.pop(action, None)
        if arriving is not None:
            work, buffer = arriving
            work.wait()
            return buffer
        found = producer(action, self._placement, self._rank)
        assert found is not None, f"{action} has no input"
        return run.results.pop(found[1])

    def _buffer(self, stage: Stage, batch: Batch) -> torch.Tensor:
        """Return an uninitialized buffer [b, s, h] for a batch's hidden states or their gradient."""
        dtype = next(p.dtype for _, p in stage.named_parameters() if p.dim() > 1)
        return torch.empty(*batch.input_ids.shape, self._width, dtype=dtype, device=self._mesh.device)

    def _from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast `tensor` in place from the rank with the head to all ranks of this pipeline, and return it."""
        if self._placement.size > 1:
            dist.broadcast(tensor, group=self._mesh.group(PP), group_src=self._last_rank)
        return tensor

    def _share(self, result: torch.Tensor | None) -> torch.Tensor:
        """Return the result of the rank with the head on all ranks of this pipeline. Only that rank passes one in."""
        if self._placement.size == 1:
            assert result is not None
            return result
        described = [None if result is None else (tuple(result.shape), result.dtype)]
        dist.broadcast_object_list(described, group=self._mesh.group(PP), group_src=self._last_rank)
        assert described[0] is not None
        shape, dtype = described[0]
        return self._from_last(torch.empty(shape, dtype=dtype, device=self._mesh.device) if result is None else result)
