"""Policies: the modules of a layer that are checkpointed, and with which treatment.

A policy is a function from (layer's name, layer, section) to a mapping of module names within the layer ("" is the
layer itself) to treatments. A third party registers its own with `@policy("name")`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping

from torch import nn

from femto_sac.section import SACSection
from femto_sac.wrapper import Treatment

Policy = Callable[[str, nn.Module, SACSection], Mapping[str, Treatment]]
POLICIES: dict[str, Policy] = {}
WHOLE = ""


def policy(name: str) -> Callable[[Policy], Policy]:
    """Register a policy under `name`. Raises ValueError where it is taken."""

    def register(function: Policy) -> Policy:
        if name in POLICIES:
            raise ValueError(f"there is a policy {name!r} already")
        POLICIES[name] = function
        return function

    return register


def layer_number(name: str) -> int:
    """Return the number in a layer's name."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else 0


@policy("none")
def none(name: str, layer: nn.Module, section: SACSection) -> Mapping[str, Treatment]:
    """Save everything."""
    return {}


@policy("full")
def full(name: str, layer: nn.Module, section: SACSection) -> Mapping[str, Treatment]:
    """Save only the input of every `sac.every`-th layer."""
    return {WHOLE: Treatment.RECOMPUTE} if layer_number(name) % section.every == 0 else {}


@policy("selective")
def selective(name: str, layer: nn.Module, section: SACSection) -> Mapping[str, Treatment]:
    """Save only results of matrix products and attention, in every `sac.every`-th layer."""
    return {WHOLE: Treatment.SELECT} if layer_number(name) % section.every == 0 else {}


@policy("modules")
def modules(name: str, layer: nn.Module, section: SACSection) -> Mapping[str, Treatment]:
    """Save only the inputs of the modules that match `sac.pattern`."""
    found = [own for own, _ in layer.named_modules() if own and fnmatch.fnmatchcase(f"{name}.{own}", section.pattern)]
    outermost = [own for own in found if not any(own.startswith(f"{other}.") for other in found)]
    return dict.fromkeys(outermost, Treatment.RECOMPUTE)
