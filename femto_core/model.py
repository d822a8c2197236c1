"""The model: any causal LM of transformers with the Llama anatomy, cut into stages.

A stage keeps the model's own code and its own parameter names; only layers outside the stage's range, and the
embedding, norm or head that other stages hold, are taken away. It receives memory later, from the sharding strategy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from femto_core.batch import Batch
from femto_core.errors import UserError
from femto_core.layout import ParamLayout
from femto_core.weights import WeightSource
from femto_ops.anatomy import changes_embeddings
from femto_ops.deferral import WeightGradients


class Head(nn.Linear):
    """The matrix from hidden states to logits, which can also run something else with its weight at hand."""

    def forward(
        self, hidden: torch.Tensor, then: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the logits [..., v] of `hidden` [..., h], or what `then(hidden, weight)` makes of the two.

        `then` runs inside the module's call, so that hooks which gather, cast or time weights see it like any other
        use, while the loss can work through the head in chunks.
        """
        return F.linear(hidden, self.weight) if then is None else then(hidden, self.weight)


class LayerRange(nn.ModuleList):
    """Some of a model's layers under their global numbers, so that names do not depend on where the model is cut."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self._modules[str(number)] = layer

        self.visible = range(0)
        """The layers that the forward pass under way sees."""

    def __getitem__(self, index: Any) -> Any:
        """Return what a list of the visible layers would; transformers' forward takes the slice of all."""
        return [self._modules[str(number)] for number in self.visible][index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __len__(self) -> int:
        return len(self.visible)


@attrs.define
class FullModel:
    """A whole causal LM on the meta device, and the source of its weights."""

    module: Any
    """transformers' ...ForCausalLM, its head replaced by `Head` and its hot spots by thriftier ones."""
    weights: WeightSource

    @property
    def config(self) -> PretrainedConfig:
        config: PretrainedConfig = self.module.config
        return config

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return self.module.lm_head.weight is self.module.model.embed_tokens.weight


class Stage:
    """What one rank computes: one or more chunks of layers in a row; the first of all embeds, the last of all has the
    final norm and the head.
    """

    def __init__(
        self,
        full: FullModel,
        chunks: Sequence[range],
        replicated: frozenset[str],
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """Cut `chunks` of layers, in ascending order, out of a copy of `full`.

        `replicated` are the mesh axes over which every rank holds this stage. `first`: its first chunk begins with the
        embedding. `last`: its last chunk ends with norm and head.
        """
        self.chunks, self.first, self.last = tuple(chunks), first, last
        self.weight_grads = WeightGradients()
        self.module = copy.deepcopy(full.module)
        self.body = self.module.model
        if (len(self.chunks) > 1 or not (first and last)) and changes_embeddings(self.body):
            raise UserError(f"{type(self.body).__name__} changes its embeddings, so that it cannot be cut into stages")
        self.body.layers = LayerRange({i: self.body.layers[i] for chunk in chunks for i in chunk})
        self._layer_types = getattr(full.config, "layer_types", None)
        if self._layer_types:
            self.body.config = copy.copy(self.body.config)
        self._no_norm = nn.Identity()
        if not self.first:
            self.body.embed_tokens = nn.Identity()
        if not self.last:
            self.body.norm = self.module.lm_head = nn.Identity()
        embedding = "model.embed_tokens.weight"
        tied = embedding if full.tied and (self.first or self.last) else ""
        self.layouts: dict[str, ParamLayout] = {}
        for name, parameter in self.named_parameters():
            is_tied = bool(tied) and name in (embedding, "lm_head.weight")
            layout = ParamLayout.whole(
                embedding if is_tied else name, parameter.shape, replicated, tied=tied if is_tied else ""
            )
            self.layouts[name] = attrs.evolve(layout, primary=not is_tied or self.first)

    @property
    def config(self) -> PretrainedConfig:
        """The full model's transformers config."""
        config: PretrainedConfig = self.module.config
        return config

    @property
    def head(self) -> nn.Module:
        """The head; only the last stage has one."""
        head: nn.Module = self.module.lm_head
        return head

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of the stage once, under its full Hugging Face name."""
        return self.module.named_parameters()  # type: ignore[no-any-return]

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the stage's decoder layers under their full names."""
        for number, layer in self.body.layers.named_children():
            yield f"model.layers.{number}", layer

    def set_layer(self, name: str, layer: nn.Module) -> None:
        """Put `layer` in the place of the one called `name`."""
        setattr(self.body.layers, name.rpartition(".")[2], layer)

    def embeds(self, chunk: int) -> bool:
        """Tell whether a chunk begins with the embedding."""
        return self.first and chunk == 0

    def has_head(self, chunk: int) -> bool:
        """Tell whether a chunk ends with the final norm, and the head follows."""
        return self.last and chunk == len(self.chunks) - 1

    def forward(self, inputs: torch.Tensor, batch: Batch, chunk: int = 0) -> torch.Tensor:
        """Return a chunk's hidden states [b, s, h], after the final norm where it is the last of all.

        `inputs` are the batch's token ids [b, s] for the first chunk of all, for others the one before's hidden states.
        """
        self.body.layers.visible = self.chunks[chunk]
        if self._layer_types:  # transformers' forward numbers them from the first layer it sees
            self.body.config.layer_types = [self._layer_types[i] for i in self.chunks[chunk]]
        norm = self.body.norm
        if not self.has_head(chunk):
            self.body.norm = self._no_norm
        try:
            entry = {"input_ids": inputs} if self.embeds(chunk) else {"inputs_embeds": inputs}
            output = self.body(**entry, position_ids=batch.position_ids, use_cache=False)
        finally:
            self.body.norm = norm
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self.module.train(mode)

    def replace_parameters(self, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
        """Put `make(name, old)` in the place of each parameter, wherever it is used, so that ties stay ties."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.module.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, key))
        for name, old in list(self.named_parameters()):
            new = make(name, old)
            for module, key in places[id(old)]:
                module._parameters[key] = new

    def allocate(
        self,
        device: torch.device,
        dtype_of: Callable[[str], torch.dtype],
        given: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """Give every parameter memory with no values yet, and every buffer its values.

        A parameter named in `given` takes that one's place, any other a tensor of its own in the dtype for its name.
        """

        def make(name: str, old: nn.Parameter) -> nn.Parameter:
            if name in given:
                return given[name]
            return nn.Parameter(torch.empty(old.shape, dtype=dtype_of(name), device=device), old.requires_grad)

        self.replace_parameters(make)
        self.compute_buffers(device)

    def compute_buffers(self, device: torch.device) -> None:
        """Compute buffers that no file holds (the rotary frequencies) anew: after the meta device they have no values.

        Raises `UserError` for a buffer that this knows no way to compute.
        """
        for name, module in self.module.named_modules():
            if not module._buffers:
                continue
            if not hasattr(module, "inv_freq"):
                raise UserError(
                    f"{name} ({type(module).__name__}) has buffers {', '.join(module._buffers)}, which no checkpoint "
                    "holds and which femto cannot compute; this architecture is not supported"
                )
            fresh = type(module)(config=module.config)
            for key, buffer in fresh._buffers.items():
                module._buffers[key] = buffer.to(device)
