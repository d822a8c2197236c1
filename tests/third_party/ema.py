"""An exponential moving average of the masters, which checkpoints keep and an export writes in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from femto_core.checkpoint import ExportTensor
from femto_core.hookspecs import hookimpl
from femto_core.metrics import StepInfo
from femto_core.trainer import Trainer

FIELD, DECAY = "ema", 0.9


class MovingAverage:
    """The plugin. The average lies in the optimizer's state, so that checkpoints save it under any layout."""

    @hookimpl
    def femto_step_end(self, trainer: Trainer, info: StepInfo) -> None:
        if info.skipped:  # no weight has changed; an optimizer that has kept nothing yet must find nothing
            return
        for share in trainer.shares:
            if share.trainable and share.master.numel():
                state, master = trainer.optimizer.state[share.master], share.master.detach()
                if FIELD in state:
                    state[FIELD].lerp_(master, 1 - DECAY)
                else:
                    state[FIELD] = master.clone(memory_format=torch.preserve_format)

    @hookimpl
    def femto_export(
        self, tensors: dict[str, ExportTensor], saved: Mapping[str, ExportTensor], settings: Mapping[str, Any]
    ) -> None:
        for name in tensors:
            tensors[name] = saved.get(f"{FIELD}/{name}", tensors[name])
