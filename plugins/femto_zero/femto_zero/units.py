"""Units of stage 3: parameters that are gathered before use, and dropped after it, together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from femto_core import collectives
from femto_core.collectives import Pending
from femto_core.model import Stage
from femto_zero.flat import FlatParameters


class Unit:
    """Flat parameters whose whole vectors exist only while they are needed.

    Their storage is emptied and filled again in place: what autograd has saved of them are views of it, so that however
    many micro-batches are between forward and backward, the values exist once at most.
    """

    def __init__(self, name: str, flats: Sequence[FlatParameters], *, in_backward: bool) -> None:
        """`in_backward`: whether the backward of the unit's modules needs the weights."""
        self.name, self.flats, self.in_backward = name, list(flats), in_backward
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
        """Begin to fill the whole vectors from every rank's share, unless they are."""
        if self.gathered:
            return
        self.gathered = True
        for flat in self.flats:
            if flat.group.size() == 1:
                continue
            # To autograd nothing has changed: the same values are there again.
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
        self.gather()  # what is on its way must arrive first
        self.gathered = False
        for flat in self.flats:
            if flat.group.size() > 1:
                flat.whole.untyped_storage().resize_(0)


@attrs.frozen
class UnitPlan:
    """Which parameters make up a unit, and which modules use them."""

    name: str
    parameters: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def in_backward(self) -> bool:
        """Whether any of the modules needs its weights for backward: all but a look-up do."""
        return not all(isinstance(module, nn.Embedding) for module in self.modules)


def plan_units(stage: Stage) -> list[UnitPlan]:
    """Divide all of a stage's parameters into units, in the order in which forward uses them.

    One for what stands before the layers (the embedding), one for each layer, one for what comes after them (norm and
    head). A parameter that is used in several places belongs to the first, whose unit is then gathered for each.
    """
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    layers = dict(stage.named_layers())
    places: list[tuple[str, nn.Module]] = []  # unit and module, in order
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    outside: Iterator[nn.Module] = (m for m in stage.module.modules() if id(m) not in inside)
    before = True
    for module in outside:
        if module is stage.body.layers:
            before = False
            places.extend(layers.items())
        elif any(parameter is not None for parameter in module._parameters.values()):
            places.append(("before" if before else "after", module))
    parameters: dict[str, list[str]] = {}
    modules: dict[str, list[nn.Module]] = {}
    owner: dict[int, str] = {}
    for unit, module in places:
        for parameter in module.parameters(recurse=unit in layers):
            key = id(parameter)
            if key not in owner:
                owner[key] = unit
                parameters.setdefault(unit, []).append(names[key])
            users = modules.setdefault(owner[key], [])
            if module not in users:
                users.append(module)
    return [UnitPlan(unit, tuple(found), tuple(modules[unit])) for unit, found in parameters.items()]
