"""Detects computation in a model's forward outside its submodules (logit scaling, embedding scaling).

The model's own forward pass is run with stubs in place of its submodules. femto calls the head by itself and splits the
body, so such computation would be skipped, and the model would be trained on another loss than its own.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def changes_logits(model: Any) -> bool:
    """Return whether transformers' ...ForCausalLM computes more than head(body(...)), such as scaled or capped logits.

    `model` may be on the meta device, and is not modified. If its forward pass fails with stubs, the answer is True.
    """
    hidden = _numbers(model.config.hidden_size)
    output = _Outputs(last_hidden_state=hidden)
    try:
        logits = _with_parts(model, model=_Returns(output), lm_head=nn.Identity())(
            input_ids=hidden[..., 0].long()
        ).logits
    except Exception:  # noqa: BLE001 - a model's forward pass may raise anything
        return True
    return not torch.equal(logits, hidden)


def changes_embeddings(body: Any) -> bool:
    """Return whether a body changes its input embeddings (scales them, for instance) before its first layer."""
    hidden = _numbers(body.config.hidden_size)
    parts = {"layers": nn.ModuleList(), "norm": nn.Identity(), "rotary_emb": _Returns((hidden, hidden))}
    try:
        output = _with_parts(body, **parts)(inputs_embeds=hidden, use_cache=False).last_hidden_state
    except Exception:  # noqa: BLE001
        return True
    return not torch.equal(output, hidden)


class _Returns(nn.Module):
    """A stub for a module: returns a fixed value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


class _Outputs(SimpleNamespace):
    """A body's outputs; fields that were not set are None, as in transformers."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None


def _with_parts(module: nn.Module, **parts: nn.Module) -> nn.Module:
    """Return a shallow copy of `module` whose submodules `parts` are replaced."""
    shell = copy.copy(module)
    shell._modules = {**module._modules, **parts}
    return shell


def _numbers(width: int) -> torch.Tensor:
    return torch.linspace(-50, 50, 2 * width, device="cpu").view(1, 2, width)
