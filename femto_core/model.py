"""The model: any causal LM of transformers with the Llama anatomy, cut into stages.

A stage keeps the model's own code and its own parameter names; only layers outside the stage's range, and the
embedding, norm or head that other stages hold, are taken away. It receives memory later, from the sharding strategy.
"""

from __future__ import annotations

import contextlib
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
from femto_core.mesh import Mesh
from femto_core.weights import WeightSource
from femto_ops.autograd import in_backward
from femto_ops.deferral import WeightGradients
from femto_ops.probes import changes_embeddings


class Head(nn.Linear):
    """The matrix from hidden states to logits, which can also run a function of both inside its call."""

    def forward(self, hidden: torch.Tensor, then: Callable[[torch.Tensor, torch.Tensor], Any] | None = None) -> Any:
        """Return the logits [..., v] of `hidden` [..., h], or what `then(hidden, weight)` makes of the two.

        `then` runs inside the module's call, so that hooks which gather, cast or time weights see it like any other
        use, while a loss can work through the head in chunks. It returns a tensor or a tuple of tensors.
        """
        return F.linear(hidden, self.weight) if then is None else then(hidden, self.weight)


class SideLosses:
    """Scalars that layers add to the loss in a forward pass (router balance, z-loss), for the schedule to collect.

    A module of the full model that has an attribute `side_losses` (None, until there is a stage) gets its stage's.
    """

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        """The sum since the last `take`; None where no layer added anything."""

    def add(self, loss: torch.Tensor) -> None:
        """Add a scalar `loss`: a sum, which is divided by the step's weight like the task's own.

        Nothing happens without gradients, nor while a checkpointed layer is computed again in backward: its first
        forward has added the loss already.
        """
        if torch.is_grad_enabled() and not in_backward():
            self.total = loss if self.total is None else self.total + loss

    def take(self) -> torch.Tensor | None:
        """Return `total`, and begin anew."""
        total, self.total = self.total, None
        return total


@attrs.define
class FullModel:
    """A whole causal LM on the meta device, and the source of its weights."""

    module: Any
    """transformers' ...ForCausalLM, its head replaced by `Head`, its norms and MLPs by fused ones."""
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
    """All that one rank computes: one or more chunks of consecutive layers, and perhaps the model's two ends.

    The first stage embeds; the last one has the final norm and the head.
    """

    def __init__(
        self,
        full: FullModel,
        chunks: Sequence[range],
        mesh: Mesh,
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
        self.side_losses = SideLosses()
        self.body_inputs: Callable[[Batch], Mapping[str, Any]] = lambda batch: {}
        """Further keyword arguments of the model's body, made of a batch; a plugin may set it."""
        self.module = copy.deepcopy(full.module)
        self.body = self.module.model
        if (len(self.chunks) > 1 or not (first and last)) and changes_embeddings(self.body):
            raise UserError(f"{type(self.body).__name__} changes its embeddings, so that it cannot be cut into stages")
        # By number, so that names do not depend on where the model is cut.
        self.body.layers = nn.ModuleDict({str(i): self.body.layers[i] for chunk in chunks for i in chunk})
        if not self.first:
            self.body.embed_tokens = nn.Identity()
        if not self.last:
            self.body.norm = self.module.lm_head = nn.Identity()
        for module in self.module.modules():
            if hasattr(module, "side_losses"):
                module.side_losses = self.side_losses
        self._bodies: list[nn.Module] = []
        embedding = "model.embed_tokens.weight"
        tied = embedding if full.tied and (self.first or self.last) else ""
        self.layouts: dict[str, ParamLayout] = {}
        partial = replicated & {*mesh.data_axes}
        for name, parameter in self.named_parameters():
            is_tied = bool(tied) and name in (embedding, "lm_head.weight")
            layout = ParamLayout.whole(embedding if is_tied else name, parameter.shape, replicated, partial)
            self.layouts[name] = attrs.evolve(layout, tied=tied if is_tied else "", primary=not is_tied or self.first)

    @property
    def config(self) -> PretrainedConfig:
        """The full model's transformers config."""
        config: PretrainedConfig = self.module.config
        return config

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the stage is trained."""
        return any(parameter.requires_grad for _, parameter in self.named_parameters())

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
        """Put `layer` in the place of the layer called `name`. To be called before the first forward."""
        setattr(self.body.layers, name.rpartition(".")[2], layer)

    def embeds(self, chunk: int) -> bool:
        """Tell whether a chunk begins with the embedding."""
        return self.first and chunk == 0

    def has_head(self, chunk: int) -> bool:
        """Tell whether a chunk ends with the final norm, and the head follows."""
        return self.last and chunk == len(self.chunks) - 1

    def forward(self, inputs: torch.Tensor, batch: Batch, chunk: int = 0, **named: Any) -> torch.Tensor:
        """Return a chunk's hidden states [b, s, h], after the final norm where the chunk ends with it.

        `inputs`: token ids [b, s] for the model's first chunk, otherwise the previous chunk's hidden states. `named`
        arguments, and those of `body_inputs`, go to the model's body.
        """
        self.side_losses.take()  # drop the losses of a forward that was not collected
        body = self._body_of(chunk)
        entry = {"input_ids": inputs} if self.embeds(chunk) else {"inputs_embeds": inputs}
        named = {"use_cache": False, **self.body_inputs(batch), **named}
        hidden: torch.Tensor = body(**entry, position_ids=batch.position_ids, **named).last_hidden_state
        return hidden

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self.module.train(mode)
        for body in self._bodies:
            body.training = mode

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch dropout off inside, and back to what it was afterwards, whatever happens."""
        was_training: bool = self.module.training
        self.train(False)
        try:
            yield
        finally:
            self.train(was_training)

    def _body_of(self, chunk: int) -> nn.Module:
        """Return transformers' body with one chunk's layers.

        Bodies share all modules and hooks with the model's own body. They are made at the first forward, when modules
        are no longer replaced. So a forward changes no module, and each chunk can be compiled or captured on its own.
        """
        if not self._bodies:
            self._bodies = [self._make_body(number) for number in range(len(self.chunks))]
        return self._bodies[chunk]

    def _make_body(self, chunk: int) -> nn.Module:
        body: nn.Module = copy.copy(self.body)
        numbers = self.chunks[chunk]
        own = {"layers": nn.ModuleList(self.body.layers[str(number)] for number in numbers)}
        body._modules = {**self.body._modules, **own}
        if not self.has_head(chunk):
            body._modules["norm"] = nn.Identity()
        config: Any = copy.copy(self.body.config)
        if types := getattr(config, "layer_types", None):  # numbered from the first layer that forward sees
            config.layer_types = [types[number] for number in numbers]
            body.config = config
        return body

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

        A parameter named in `given` is replaced by the given one, any other by a new tensor in the dtype for its name.
        """

        def make(name: str, old: nn.Parameter) -> nn.Parameter:
            if name in given:
                return given[name]
            return nn.Parameter(torch.empty(old.shape, dtype=dtype_of(name), device=device), old.requires_grad)

        self.replace_parameters(make)
        self.compute_buffers(device)

    def compute_buffers(self, device: torch.device) -> None:
        """Compute the buffers that no file holds: on the meta device they had no values.

        Rotary frequencies follow from the config; any other module computes its own by a method
        `reset_buffers(device)`. Raises `UserError` for a module with buffers and no such method.
        """
        for name, module in self.module.named_modules():
            if not module._buffers:
                continue
            if callable(reset := getattr(module, "reset_buffers", None)):
                reset(device)
                continue
            if not hasattr(module, "inv_freq"):
                raise UserError(
                    f"{name} ({type(module).__name__}) has buffers {', '.join(module._buffers)}, which femto "
                    "neither loads nor computes; this architecture is not supported"
                )
            fresh = type(module)(config=module.config)
            for key, buffer in fresh._buffers.items():
                module._buffers[key] = buffer.to(device)
