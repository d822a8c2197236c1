"""Detects models that let packed documents see one another (linear attention, convolutions, masks without positions).

A row may hold several documents, and position ids that restart are all that says so. transformers' attention masks hear
of them in most models; a layer with a state or a convolution does not. So a tiny model of the same architecture runs on
two rows that differ in their first document only: the second one's hidden states must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

VOCAB, INNER, HEADS = 64, 8, 2
FIRST, SECOND = 6, 7
"""Tokens of the first document, and of the second."""
BOUND = 1e-3
"""Largest accepted change of the second document, relative to the first one's: above rounding, and below any leak."""


class Rows(Protocol):
    """A batch, as far as it matters here: int64 tensors [b, s]."""

    @property
    def targets(self) -> torch.Tensor: ...

    @property
    def position_ids(self) -> torch.Tensor: ...


class DocumentCheck:
    """Refuses packed rows of a model that does not keep documents apart; the model is tried at the first such row."""

    def __init__(self, model: Any) -> None:
        """`model` is transformers' ...ForCausalLM, on any device and with any of its layers."""
        self._model, self._tried = model, False

    def problem_of(self, batches: Iterable[Rows]) -> str:
        """Return what is wrong with `batches` (on the CPU) for this model, or an empty string."""
        if self._tried or not any(map(trains_packed_rows, batches)):
            return ""
        self._tried = True
        return leak_between_documents(self._model)


def trains_packed_rows(batch: Rows, ignore_index: int = -100) -> bool:
    """Return whether a row has targets behind its first document; padding behind a single document has none."""
    later = (batch.position_ids.diff(dim=1) != 1).cumsum(1) > 0
    return bool((later & (batch.targets[:, 1:] != ignore_index)).any())


def leak_between_documents(model: Any) -> str:
    """Return a sentence that says that `model` does not keep packed documents apart, or an empty string.

    `model` is transformers' ...ForCausalLM; it is not modified, and only its class and config are used. A model of
    another library is taken to keep them apart. One whose tiny copy cannot be built or run is not.
    """
    if not isinstance(model, PreTrainedModel):
        return ""
    name, rows = type(model).__name__, "so rows must hold one document each"
    changes: list[Callable[[Any], None]] = [_narrow, lambda _: None]  # not every architecture can be narrow
    for change in changes:
        config = copy.deepcopy(model.config)
        try:
            change(config)
            apart = _keeps_apart(_tiny(type(model), config))
        except Exception:  # noqa: BLE001 - sizes that do not fit one another may raise anything
            continue
        return "" if apart else f"{name} lets a document see the one before it in its row, {rows}"
    return f"a small {name} could not be tried on packed documents, {rows}"


@torch.no_grad()
def _keeps_apart(model: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(VOCAB, (1, n), generator=generator) for n in (FIRST, FIRST, SECOND))
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    here, there = (
        model.model(input_ids=torch.cat([start, second], 1), position_ids=positions, use_cache=False).last_hidden_state
        for start in (first, other)
    )
    change = (here - there).abs()
    if not change[:, :FIRST].max() > 0:
        raise ValueError("the model's hidden states do not depend on its input")
    return bool(change[:, FIRST:].max() < BOUND * change[:, :FIRST].max())


def _tiny(cls: Any, config: PretrainedConfig) -> Any:
    """Return a model of `config` with few layers and tokens, on the CPU, its weights large enough to matter."""
    attention = config._attn_implementation or "sdpa"
    if attention not in ("sdpa", "eager"):
        attention = "eager"  # kernels for a GPU are handed the same masks or positions
    _shorten(config)
    with torch.device("meta"):
        layers = cls._from_config(config, attn_implementation=attention).model.layers
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    signs = [(str(layer), kind) for layer, kind in zip(layers, kinds, strict=True)]
    count = 1 + max(map(signs.index, set(signs)))  # as few as have every kind of layer
    _keep_layers(config, count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls._from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
        if len(model.model.layers) < count:
            raise ValueError("the number of layers does not follow num_hidden_layers")
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            else:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def _narrow(config: Any) -> None:
    """Give `config` two attention heads of their own width, and hidden states as wide as both."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shares = config.num_key_value_heads < config.num_attention_heads
    config.num_attention_heads, config.num_key_value_heads = HEADS, 1 if shares else HEADS
    config.hidden_size = HEADS * width
    if hasattr(config, "head_dim"):
        config.head_dim = width


def _shorten(config: Any) -> None:
    """Give `config` a small vocabulary, which special tokens lie within, and narrow MLPs."""
    for key, value in list(vars(config).items()):
        if key.endswith("_token_id") and value is not None:
            setattr(config, key, [0] if isinstance(value, list) else 0)
        elif key.endswith("intermediate_size") and isinstance(value, int) and value:
            setattr(config, key, INNER)
        elif "vocab_size" in key and isinstance(value, int) and value:
            setattr(config, key, VOCAB)


def _keep_layers(config: Any, count: int) -> None:
    """Give `config` only its first `count` layers."""
    whole = config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == whole:
            setattr(config, key, value[:count])
    for key in ("num_hidden_layers", "num_layers"):
        if key in vars(config):
            setattr(config, key, count)
