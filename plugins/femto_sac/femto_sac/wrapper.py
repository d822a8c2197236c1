"""ActivationCheckpointWrapper: a module that saves its inputs and recomputes its activations in backward.

(Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198, section 5.)
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Treatment(enum.Enum):
    """How a module's activations reach backward: saved, or computed again."""

    KEEP = "keep"
    """All activations are saved."""
    SELECT = "select"
    """Results of matrix products and attention are saved; cheaper operations are recomputed."""
    RECOMPUTE = "recompute"
    """Only the inputs are saved."""


_aten = torch.ops.aten
EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}
"""Operations whose results are saved under SELECT."""


class ActivationCheckpointWrapper(nn.Module):
    """Takes a module's place under the same names: it shares the module's parameters, buffers and children.

    Outside training, and without gradients, it only calls the module.
    """

    def __init__(self, module: nn.Module, choose: Callable[[ActivationCheckpointWrapper, Any, Any], Treatment]) -> None:
        """`choose(wrapper, inputs, named inputs)` is asked in every forward in training."""
        super().__init__()
        self.__dict__["inner"] = module  # not a child, or every name would change
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._choose = choose
        self.keeps_rng = has_dropout(module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["inner"], name)

    def train(self, mode: bool = True) -> ActivationCheckpointWrapper:
        self.inner.train(mode)
        self.training = mode
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return self.inner(*inputs, **named)
        if named.get("use_cache"):
            named["use_cache"] = False  # recomputation would find the cache that forward has filled
        return self.run(self._choose(self, inputs, named), inputs, named)

    def run(self, treatment: Treatment, inputs: Any, named: Any) -> Any:
        """Run the module with a treatment."""
        if treatment is Treatment.KEEP:
            return self.inner(*inputs, **named)
        extra: dict[str, Any] = {}
        if treatment is Treatment.SELECT:
            extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_expensive)
        # torch's debug mode stays off, because it records every operation.
        return checkpoint(
            self.inner, *inputs, use_reentrant=False, preserve_rng_state=self.keeps_rng, debug=False, **extra, **named
        )


def keep_expensive(context: Any, operation: Any, *_inputs: Any, **_named: Any) -> CheckpointPolicy:
    """Save the results of `EXPENSIVE` operations, and recompute all others."""
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def has_dropout(module: nn.Module) -> bool:
    """Tell whether any part of `module` may draw random numbers in training."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p:
            return True
        if any(isinstance(v, float) and v for k, v in vars(part).items() if k.endswith("dropout")):
            return True
    return False
