"""Parameters under the names that files have them: transformers keeps experts in one tensor, files one each.

The rules are transformers' own (`conversion_mapping`), which from_pretrained and save_pretrained apply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from femto_ops.hugging_face import ModelError, one_line


@attrs.define
class SavedParameter:
    """A parameter as files hold it: one tensor of its shape, or several that are put together."""

    name: str
    model: Any
    """transformers' model, for the rules that ask its config."""
    converter: Any = None
    """transformers' rule that puts tensors together; None for a tensor that is the parameter."""
    group: str = ""
    """The name by which the converter knows what it makes: that of the first parameter."""
    matched: dict[str, list[str]] = attrs.field(factory=dict)
    """The names of the saved tensors, by the converter's pattern that they match."""
    shape: tuple[int, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The names of the saved tensors."""
        return [key for keys in self.matched.values() for key in keys]

    def assemble(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all parameters, by name, that the converter makes of the saved tensors that `read` returns.

        Raises `ModelError` where they do not fit together.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, keys in self.matched.items():
            for key in keys:
                converter.add_tensor(self.group, key, pattern, read(key))
        try:
            made: dict[str, Any] = converter.convert(self.group, model=self.model, config=self.model.config)
        except Exception as error:
            raise ModelError(
                f"{self.keys[0]} and {len(self.keys) - 1} more tensors do not make {self.name}: {one_line(error)}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def saved_parameters(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, SavedParameter], list[str]]:
    """Return how each parameter of a transformers `model` is made of saved tensors, by name, and the names left over.

    `shapes` has the saved tensors. Raises `ModelError` where tensors do not make a parameter together.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    wanted = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, SavedParameter] = {}
    left = []
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted or (pattern is None and name in found):
            left.append(key)
            continue
        rule = None if pattern is None else by_pattern[pattern]
        saved = found.setdefault(name, SavedParameter(name, model, rule, name, shape=shapes[key]))
        saved.matched.setdefault(pattern or key, []).append(key)
    for saved in [saved for saved in found.values() if saved.converter is not None]:
        for name, values in saved.assemble(lambda key: torch.empty(shapes[key], device="meta")).items():
            found[name] = attrs.evolve(saved, name=name, shape=tuple(values.shape))
    return found, left


def names_as_saved(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the names and shapes of the tensors that save_pretrained makes of each parameter of `model`.

    `shapes` has the parameters. Where it makes a tensor of several parameters, all keep their names.
    """
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    parts = {name: split_as_saved(model, name, tensor) for name, tensor in meta.items()}
    if {key for made in parts.values() for key in made} != set(revert_weight_conversion(model, meta)):
        return {name: {name: shape} for name, shape in shapes.items()}
    return {name: {key: tuple(part.shape) for key, part in made.items()} for name, made in parts.items()}


def split_as_saved(model: Any, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors, by name, that save_pretrained makes of one parameter."""
    made: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: values})
    return made
