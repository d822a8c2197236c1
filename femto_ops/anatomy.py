"""What a model does besides its parts: found by running its own forward pass around stand-ins for them.

A head that is called by itself, and a body that is cut, leave such things out; better to refuse a model than to train
it on another loss than its own.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def changes_logits(model: Any) -> bool:
    """Tell whether transformers' ...ForCausalLM does more than head(body(...)): scaled or capped logits, for instance.

    `model` may be on the meta device; nothing of it is changed. A forward pass that cannot be followed counts as more.
    """
    hidden = _numbers(model.config.hidden_size)
    output = _Outputs(last_hidden_state=hidden)
    try:
        logits = _with_parts(model, model=_Returns(output), lm_head=nn.Identity())(
            input_ids=hidden[..., 0].long()
        ).logits
    except Exception:  # noqa: BLE001 - whatever another's forward pass may raise
        return True
    return not torch.equal(logits, hidden)


def changes_embeddings(body: Any) -> bool:
    """Tell whether a body does something to the embeddings it is given (scales them, say) before its first layer."""
    hidden = _numbers(body.config.hidden_size)
    parts = {"layers": nn.ModuleList(), "norm": nn.Identity(), "rotary_emb": _Returns((hidden, hidden))}
    try:
        output = _with_parts(body, **parts)(inputs_embeds=hidden, use_cache=False).last_hidden_state
    except Exception:  # noqa: BLE001
        return True
    return not torch.equal(output, hidden)


class _Returns(nn.Module):
    """Stands for a module, and returns what it was told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


class _Outputs(SimpleNamespace):
    """A body's outputs: those that nobody gave are None, as transformers' are."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None


def _with_parts(module: nn.Module, **parts: nn.Module) -> nn.Module:
    """Return a copy of `module` that shares all but `parts`."""
    shell = copy.copy(module)
    shell._modules = {**module._modules, **parts}
    return shell


def _numbers(width: int) -> torch.Tensor:
    return torch.linspace(-50, 50, 2 * width, device="cpu").view(1, 2, width)
