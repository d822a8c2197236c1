"""What a rank of a pipeline does, one small value for each thing, with a printable form.

`F3` is the forward of micro-batch 3, `F3.1` that of its second chunk on this rank; `B` and `W` are backward's two
halves (input gradient, weight gradient), a `B` with no `W` to follow is all of it. `RF`, `SF`, `RB`, `SB` receive and
send what lies between.
"""

from __future__ import annotations

from typing import ClassVar

import attrs


@attrs.frozen
class Action:
    """One thing to do for one micro-batch, in one of this rank's chunks."""

    symbol: ClassVar[str] = ""

    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.symbol}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Forward(Action):
    """Run a chunk forward."""

    symbol = "F"


class Backward(Action):
    """Run a chunk backward: all of it, or the input gradient alone where a `WeightBackward` follows."""

    symbol = "B"


class WeightBackward(Action):
    """Compute the weight gradients that a chunk's backward has put off."""

    symbol = "W"


class RecvForward(Action):
    """Receive the hidden states that a chunk's forward needs."""

    symbol = "RF"


class SendForward(Action):
    """Send what a chunk's forward gave."""

    symbol = "SF"


class RecvBackward(Action):
    """Receive the gradient that a chunk's backward needs."""

    symbol = "RB"


class SendBackward(Action):
    """Send the input gradient that a chunk's backward gave."""

    symbol = "SB"


@attrs.frozen
class _Pair:
    send: Action
    receive: Action

    def __str__(self) -> str:
        return f"{self.send}+{self.receive}"


class SendForwardRecvBackward(_Pair):
    """Send and receive in one: `SF3+RB1`."""


class SendBackwardRecvForward(_Pair):
    """Send and receive in one: `SB1+RF4`."""


Compute = Forward | Backward | WeightBackward
Step = Action | _Pair


def receive_of(step: Step) -> Action | None:
    """Return what a step receives, if anything."""
    if isinstance(step, _Pair):
        return step.receive
    return step if isinstance(step, RecvForward | RecvBackward) else None


def send_of(step: Step) -> Action | None:
    """Return what a step sends, if anything."""
    if isinstance(step, _Pair):
        return step.send
    return step if isinstance(step, SendForward | SendBackward) else None
