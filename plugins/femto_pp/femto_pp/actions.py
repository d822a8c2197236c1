"""The actions of a pipeline's rank, each with a printable form.

`F3` is the forward of micro-batch 3 in the rank's first chunk, `F3.1` in its second. `B` and `W` are the two halves of
backward (input gradient, weight gradient); a `B` without a `W` computes both. `SF3` sends the result of `F3`, and `RF3`
receives its input.
"""

from __future__ import annotations

from typing import ClassVar

import attrs


@attrs.frozen
class Compute:
    """A computation of one micro-batch in one of the rank's chunks."""

    symbol: ClassVar[str]

    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.symbol}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Forward(Compute):
    """Run a chunk forward."""

    symbol = "F"


class Backward(Compute):
    """Run a chunk backward: all of it, or only the input gradient if a `WeightBackward` follows."""

    symbol = "B"


class WeightBackward(Compute):
    """Compute the weight gradients that a chunk's `Backward` deferred."""

    symbol = "W"


@attrs.frozen
class Send:
    """Send the result of `compute` to the rank that needs it: hidden states, or their gradient."""

    compute: Compute

    def __str__(self) -> str:
        return f"S{self.compute}"


@attrs.frozen
class Recv:
    """Receive the input of `compute` from the rank that has it: hidden states, or their gradient."""

    compute: Compute

    def __str__(self) -> str:
        return f"R{self.compute}"


Action = Compute | Send | Recv
