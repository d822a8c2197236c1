"""Initial values of one module's parameters, as transformers draws them, without memory for the rest of the model."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from femto_ops.memory import free_memory, gib


class InitialWeights:
    """The values that transformers' `_init_weights` gives each parameter: its module's own, then its ancestors'.

    A module may write parameters of modules within it (a mixture its router's), after these have written their own.
    Values depend on the seed and on the names of the modules that write them.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """Find out which modules write each parameter of `model`, which is on the meta device and is not changed.

        Raises `ValueError` with the name of a parameter that none writes.
        """
        self._seed = seed
        self._model = copy.deepcopy(model)
        modules = dict(self._model.named_modules())
        self._owners = {
            f"{owner}.{key}": (owner, key)
            for owner, module in modules.items()
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        self._writers: dict[str, list[str]] = {name: [] for name in self._owners}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for name in reversed(modules):  # modules before those that hold them
                self._record_writes(name, modules[name])
        if left := [name for name, writers in self._writers.items() if not writers]:
            raise ValueError(f"{type(model).__name__} gives {left[0]} no initial values; load a model's weights")

    def read(self, name: str) -> torch.Tensor:
        """Return the values of the parameter `name`, on the CPU. Raises `ValueError` where memory does not suffice."""
        owner, key = self._owners[name]
        whole = copy.deepcopy(self._model.get_submodule(owner))
        needed = 2 * sum(
            p.nbytes for p in whole._parameters.values() if p is not None
        )  # these, and what is read of them
        if needed > (free := free_memory(torch.device("cpu"))):
            raise ValueError(
                f"{name} of shape {list(getattr(whole, key).shape)} needs {gib(needed)}, {gib(free)} are free"
            )
        for own, parameter in whole._parameters.items():
            if parameter is not None:
                whole._parameters[own] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
        for writer in self._writers[name]:
            place = owner.removeprefix(writer).lstrip(".")
            tree = _with_module(self._model.get_submodule(writer), place, whole) if place else whole
            digest = hashlib.sha256(f"{self._seed}:{owner}{f'@{writer}' if place else ''}".encode()).digest()
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8], "little"))
                self._rule(writer)(tree)
        values: torch.Tensor = getattr(whole, key).detach()
        return values

    def _record_writes(self, name: str, module: nn.Module) -> None:
        inside = dict(module.named_parameters(name, remove_duplicate=False))
        before = {full: parameter._version for full, parameter in inside.items()}
        self._rule(name)(module)
        for full, parameter in inside.items():
            if parameter._version != before[full]:
                self._writers[full].append(name)

    def _rule(self, name: str) -> Callable[[nn.Module], Any]:
        """Return the `_init_weights` of the innermost model that holds the module `name`, or is it."""
        models = [module for module in self._around(name) if isinstance(module, PreTrainedModel)]
        rule: Callable[[nn.Module], Any] = models[-1]._init_weights
        return rule

    def _around(self, name: str) -> Iterator[nn.Module]:
        """Yield the modules from the whole model down to the module `name`."""
        module: nn.Module = self._model
        yield module
        for part in filter(None, name.split(".")):
            module = module._modules[part]  # type: ignore[assignment]
            yield module


def _with_module(tree: nn.Module, place: str, module: nn.Module) -> nn.Module:
    """Return `tree` with `module` at `place`; only the modules on the way there are copied, without their values."""
    first, _, rest = place.partition(".")
    shell = copy.copy(tree)
    inner = module if not rest else _with_module(tree._modules[first], rest, module)  # type: ignore[arg-type]
    shell._modules = {**tree._modules, first: inner}
    return shell
