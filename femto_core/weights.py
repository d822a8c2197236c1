"""Where weights come from: random numbers, or a Hugging Face directory. Each rank reads only the boxes it holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from femto_core.errors import UserError, suggest
from femto_core.layout import Box
from femto_ops.conversion import saved_parameters
from femto_ops.hugging_face import ModelError, weight_files
from femto_ops.initial_weights import InitialWeights

PLAIN = ("F64", "F32", "BF16", "F16")
"""Dtypes whose numbers are the weights themselves, in safetensors' spelling."""


class WeightSource(Protocol):
    """Values of a model's parameters, by full name."""

    def read(self, name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Return the values in each of `boxes` of the parameter `name`, on the CPU, in the dtype of the source."""


class RandomWeights:
    """Initial weights by transformers' own rule for each module; they depend on the seed and the module's name only.

    So every layout starts from the same weights, whatever its ranks have drawn from their random generators before.
    """

    def __init__(self, model: Any, seed: int) -> None:
        """Take the full `model`, as transformers builds it on the meta device.

        Raises `UserError` with the name of a parameter that no module initialises.
        """
        try:
            self._initial = InitialWeights(model, seed)
        except ValueError as error:
            raise UserError(str(error)) from None

    def read(self, name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        try:
            whole = self._initial.read(name)
        except ValueError as error:
            raise UserError(str(error)) from None
        return [whole[box.slices()] for box in boxes]


class SafetensorsWeights:
    """The weights in a Hugging Face directory, in one safetensors file or in several with an index."""

    def __init__(self, directory: Path, model: Any) -> None:
        """Check that the files hold exactly the parameters of `model`, in its shapes; no values are read yet.

        Raises `UserError` with the file or the key, where there are no weights, a shard is absent, truncated or outside
        the directory, or a parameter is missing, unexpected, quantised, or of another shape.
        """
        self._directory = directory
        try:
            self._files = {name: self._open(name) for name in weight_files(directory)}
        except ModelError as error:
            raise UserError(str(error)) from None
        self._where: dict[str, str] = {}
        for name, file in self._files.items():
            for key in file.keys():  # noqa: SIM118 - no dict
                if key in self._where:
                    raise UserError(f"{directory}: {key} is in both {self._where[key]} and {name}")
                self._where[key] = name
        try:
            self._saved, left = saved_parameters(model, {key: self._slice(key).get_shape() for key in self._where})
        except ModelError as error:
            raise UserError(f"{directory}: {error}") from None
        self._check(model, left)

    def read(self, name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        saved = self._saved[name]
        whole = saved.assemble(lambda key: self._slice(key)[:])[name] if saved.converter else self._slice(*saved.keys)
        return [whole[box.slices()] for box in boxes]

    def _slice(self, key: str) -> Any:
        return self._files[self._where[key]].get_slice(key)

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self._directory / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self._directory / name} is damaged or truncated: {error}") from None

    def _check(self, model: Any, left: Sequence[str]) -> None:
        wanted = dict(model.named_parameters())
        aliases = set(dict(model.named_parameters(remove_duplicate=False))) - set(wanted)
        ignored = [re.compile(p) for p in (getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])]
        ignored.append(re.compile(r"rotary_emb\.inv_freq$"))  # older transformers saved what is computed today
        missing = [name for name in wanted if name not in self._saved]
        extra = [name for name in left if not any(p.search(name) for p in ignored)]
        if missing:
            raise UserError(
                f"{self._directory} lacks {len(missing)} of the model's {len(wanted)} parameters, the first of them "
                f"{missing[0]}{suggest(missing[0], extra)}"
            )
        if buffers := [name for name in extra if name in model.state_dict()]:
            raise UserError(
                f"{self._directory} holds {buffers[0]}, a buffer of {type(model).__name__}, and femto trains and saves "
                "parameters only; this architecture is not supported"
            )
        if extra:
            raise UserError(
                f"{self._directory} holds {len(extra)} tensors the model does not have, the first {extra[0]}"
            )
        for name in [*wanted, *sorted(aliases & set(self._saved))]:
            for key in self._saved[name].keys:
                if (dtype := self._slice(key).get_dtype()) not in PLAIN:
                    raise UserError(
                        f"{self._directory / self._where[key]}: {key} is {dtype}, quantised, and its numbers mean "
                        "nothing without their scales; use the model's weights in BF16, F16 or F32"
                    )
            found, asked = tuple(self._saved[name].shape), tuple(model.get_parameter(name).shape)
            if found != asked:
                raise UserError(f"{self._directory}: {name} has shape {found}, but config.json asks for {asked}")
        for alias in sorted(aliases & set(self._saved)):
            self._check_alias(alias, model)

    def _check_alias(self, alias: str, model: Any) -> None:
        """Refuse two saved copies of a tied weight that differ."""
        tied = next(n for n, p in model.named_parameters() if p is model.get_parameter(alias))
        whole = [Box((0,) * p.dim(), tuple(p.shape)) for p in [model.get_parameter(alias)]]
        if not torch.equal(self.read(alias, whole)[0], self.read(tied, whole)[0]):
            raise UserError(
                f"{self._directory}: config.json ties {alias} to {tied}, but their saved values differ; "
                "set tie_word_embeddings to false in config.json to keep both"
            )
