"""Inverse-square-root learning rate, and a file that notes every spike of the gradient norm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import positive

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.metrics import StepInfo
    from femto_core.trainer import Trainer


@attrs.frozen(kw_only=True)
class InvSqrtSection:
    """Inverse-square-root learning rate, and what counts as a spike."""

    timescale: int = attrs.field(default=20, validator=positive)
    """The step with the peak learning rate: a linear rise leads up to it, and a fall with 1 / sqrt(step) away."""
    spike: float = attrs.field(default=3.0, validator=positive)
    """Note a gradient norm in spikes.tsv where it is more than this many times the median of the last 100."""


class InvSqrt:
    """The hooks. femto makes one object of this class for each run."""

    def __init__(self) -> None:
        self._spikes: SpikeFile | None = None

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[InvSqrtSection]]:
        return "invsqrt", InvSqrtSection

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        if config.optim.schedule != "cosine":  # the default: nobody asked for it
            raise UserError(f"optim.schedule = {config.optim.schedule!r} has no effect beside plugin invsqrt; drop one")

    @hookimpl
    def femto_lr_schedule(self, config: Config) -> InverseSquareRoot:
        return InverseSquareRoot(config.section(InvSqrtSection).timescale)

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            self._spikes = SpikeFile(trainer.run_dir / "spikes.tsv", trainer.config.section(InvSqrtSection).spike)

    @hookimpl
    def femto_step_end(self, info: StepInfo) -> None:
        if self._spikes is not None:
            self._spikes.see(info.step, info.grad_norm)


@attrs.frozen
class InverseSquareRoot:
    """The schedule of Vaswani et al. 2017, section 5.3: the run's length need not be known beforehand."""

    timescale: int

    def __call__(self, step: int) -> float:
        """Return the factor on the peak learning rate for the update number `step`, counted from 0."""
        share = (step + 1) / self.timescale
        return min(share, 1 / math.sqrt(share))


class SpikeFile:
    """A table of step, gradient norm, and the median it is far above; a norm that is not finite is a spike too."""

    def __init__(self, path: Path, factor: float) -> None:
        self._path, self._factor = path, factor
        self._recent: deque[float] = deque(maxlen=100)
        if not path.exists():
            path.write_text("step\tgrad_norm\tmedian\n")

    def see(self, step: int, norm: float) -> None:
        """Note `norm` if it is a spike; otherwise only remember it."""
        median = statistics.median(self._recent) if self._recent else math.inf
        if norm > self._factor * median or not math.isfinite(norm):
            with self._path.open("a") as file:
                file.write(f"{step}\t{norm!r}\t{median!r}\n")
        if math.isfinite(norm):
            self._recent.append(norm)
