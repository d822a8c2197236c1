"""What a layer saves for backward lies in the CPU's memory until backward needs it."""

from __future__ import annotations

import functools

from torch import nn
from torch.autograd.graph import save_on_cpu

from femto_core.hookspecs import hookimpl


class ActivationOffload:
    """The plugin."""

    @hookimpl
    def femto_wrap_layer(self, layer: nn.Module) -> None:
        forward = layer.forward

        @functools.wraps(forward)
        def offloaded(*inputs: object, **named: object) -> object:
            with save_on_cpu():
                return forward(*inputs, **named)

        setattr(layer, "forward", offloaded)  # noqa: B010 - in place: a wrapper would rename the parameters
