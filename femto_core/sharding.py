"""The sharding seat: which part of the weights a rank keeps and updates, and how gradients reach it."""

from __future__ import annotations

import contextlib
from typing import Protocol

from femto_core.model import Stage
from femto_core.precision import ParamShare, Precision


class ShardingStrategy(Protocol):
    """Gives a stage its memory, sums its gradients, and keeps its weights whole where they compute.

    Gradients are sums over each layout's partial axes: nothing is averaged.
    """

    def allocate(self, stage: Stage, precision: Precision) -> list[ParamShare]:
        """Give the stage, which is on the meta device, its memory; return this rank's share of each parameter.

        Shares come in the order of the stage's parameters, empty shares included, and their layouts say which part each
        share is. Values are loaded into the masters afterwards. From here on gradients are watched.
        """

    def no_sync(self, *, complete: bool = True) -> contextlib.AbstractContextManager[None]:
        """Wrap the backward of every micro-batch except the last: gradients only accumulate.

        `complete=False`: some gradients of this micro-batch are not computed yet (its weight gradients are deferred).
        """

    def finish_gradients(self) -> None:
        """After the last backward: have the summed gradient of every share in its `compute.grad`.

        It is zero where a parameter was not used.
        """

    def weights_changed(self) -> None:
        """After shares have new values: refresh, or drop, what this rank holds of other ranks' shares."""

    def post_step(self) -> None:
        """Release what only this step needed; also after a step that left the weights untouched."""

    def close(self) -> None:
        """Undo what was attached to the stage."""
