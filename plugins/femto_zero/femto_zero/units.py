"""Units of stage 3: parameters that are gathered together before use, and dropped together after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from femto_core.model import Stage
from femto_ops import collectives
from femto_ops.collectives import Pending
from femto_zero.flat import FlatParameters


class Unit:
    """Flat parameters whose whole vectors exist only while they are needed.

    Their storage is emptied and filled again in place. What autograd has saved are views of that storage, so the values
    exist at most once, however many micro-batches are between forward and backward.
    """

    def __init__(self, name: str, flats: Sequence[FlatParameters]) -> None:
        self.name, self.flats = name, list(flats)
        self.gathered = True  # `whole` has its memory, with no values
        self._pending: list[Pending] = []
        for flat in self.flats:
            if flat.group.size() > 1:
                flat.keep_share_apart()
        self.release()

    @property
    def trainable(self) -> bool:
        """Whether any of the parameters is trained."""
        return any(flat.kind.trainable for flat in self.flats)

    def start_gather(self) -> None:
        """Begin to fill the whole vectors from every rank's share, unless they are filled."""
        if self.gathered:
            return
        self.gathered = True
        for flat in self.flats:
            if flat.group.size() == 1:
                continue
            # For autograd nothing has changed: the values are the same as before.
            with torch.no_grad(), preserve_version(flat.whole):
                flat.whole.untyped_storage().resize_(flat.nbytes)
                flat.mine.copy_(flat.share)
                self._pending.append(collectives.all_gather(flat.whole, flat.group))

    def gather(self) -> None:
        """Have the whole vectors filled on return."""
        self.start_gather()
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()

    def release(self) -> None:
        """Drop the whole vectors' memory."""
        if not self.gathered:
            return
        self.gather()  # values in flight must arrive first
        self.gathered = False
        for flat in self.flats:
            if flat.group.size() > 1:
                flat.whole.untyped_storage().resize_(0)


@attrs.define(eq=False, kw_only=True)
class ModuleUse:
    """A module that uses units, and where it comes in forward."""

    number: int
    chunk: int
    """The chunk of the stage that it belongs to."""
    module: nn.Module
    units: tuple[Unit, ...]
    looks_up: bool
    """Whether it is the embedding, whose backward needs no weights."""
    in_backward: bool = False
    """Whether backward comes here and needs the weights."""
    side_before: torch.Tensor | None = None
    """The stage's side losses when forward began."""


def chunk_of(stage: Stage, module: nn.Module) -> int:
    """Return the chunk of the stage in which `module`, a layer or a module outside the layers, computes."""
    for name, layer in stage.named_layers():
        if layer is module:
            number = int(name.rpartition(".")[2])
            return next(chunk for chunk, layers in enumerate(stage.chunks) if number in layers)
    return 0 if module is stage.body.embed_tokens else len(stage.chunks) - 1


def plan_units(stage: Stage) -> tuple[dict[str, tuple[str, ...]], list[tuple[nn.Module, tuple[str, ...]]]]:
    """Divide a stage's parameters into units; return each unit's, and for each module, in forward's order, its units.

    There is one unit for the embedding, one for each layer, and one for norm and head. A parameter that several modules
    use belongs to the first module's unit, which is then gathered for each of them.
    """
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    layers = dict(stage.named_layers())
    places: dict[nn.Module, str] = {}
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    outside: Iterator[nn.Module] = (m for m in stage.module.modules() if id(m) not in inside)
    before = True
    for module in outside:
        if module is stage.body.layers:
            before = False
            for name, layer in layers.items():
                places.setdefault(layer, name)
        elif any(parameter is not None for parameter in module._parameters.values()):
            places[module] = "before" if before else "after"
    owner: dict[str, str] = {}  # of each parameter
    uses: list[tuple[nn.Module, tuple[str, ...]]] = []
    for module, unit in places.items():
        used = [names[id(parameter)] for parameter in module.parameters(recurse=unit in layers)]
        for name in used:
            owner.setdefault(name, unit)
        uses.append((module, tuple(dict.fromkeys(owner[name] for name in used))))
    units = {unit: tuple(n for n in owner if owner[n] == unit) for unit in dict.fromkeys(owner.values())}
    return units, uses
