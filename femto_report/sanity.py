"""Sanity checks of a run: its first loss, gradient norms and memory, in a short report of rank 0.

A run whose steps leave the weights untouched is ended, on every rank.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_report.writing import say

if TYPE_CHECKING:
    from femto_core.metrics import StepInfo
    from femto_core.trainer import Trainer

START_TOLERANCE = 0.5
"""Largest distance of a random model's first loss from ln(vocabulary): ties and wide init move it a little."""
LOADED_MARGIN = 1.0
NORM_RANGE = (0.1, 10.0)
OFTEN = 0.5
FIRST_STEPS = 10
"""A run whose first steps all leave the weights untouched will not recover."""


class SanityReport:
    """Checks the first loss against ln(vocabulary), the gradient norms, and memory against the estimate."""

    def __init__(self) -> None:
        self._norms: list[float] = []
        self._peak = 0.0
        self._skipped = 0

    @hookimpl
    def femto_train_begin(self) -> None:
        self._norms = []
        self._skipped = 0

    @hookimpl
    def femto_step_end(self, trainer: Trainer, info: StepInfo) -> None:
        self._skipped = self._skipped + 1 if info.skipped else 0
        most, first = trainer.config.train.max_skipped, min(FIRST_STEPS, trainer.end)
        if most and (self._skipped >= most or info.skipped_total == info.step == first):
            cause = "a gradient norm that is not finite" if info.tokens else "no valid target"
            raise UserError(
                f"step {info.step}: the last {self._skipped} steps left the weights untouched, this one because of "
                f"{cause}; lower --optim.lr, look at the data, or go on from an earlier checkpoint "
                "(--train.max-skipped 0: no limit)"
            )

    @hookimpl
    def femto_log(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if "loss" not in metrics:
            return
        if step == 1:
            say(first_loss(trainer, metrics["loss"]))
        self._norms.append(metrics["grad_norm"])
        self._peak = metrics["peak_memory_mib"]

    @hookimpl
    def femto_train_end(self, trainer: Trainer) -> None:
        if self._norms:  # only rank 0 has any
            say(gradient_norms(self._norms, trainer.config.optim.clip))
            say(memory(trainer, self._peak))


def first_loss(trainer: Trainer, loss: float) -> str:
    """Judge the loss before the first update: near ln(vocabulary) for random weights, well below it for loaded ones."""
    section = trainer.config.model
    expected = math.log(trainer.stage.config.vocab_size)
    text = f"first loss {loss:.3f}, ln(vocabulary) {expected:.3f}"
    loaded = bool(section.path) and section.weights == "load"
    if loaded and loss > expected - LOADED_MARGIN:
        return f"WARNING  {text}: as bad as chance; did the weights load, and is the tokenizer the model's?"
    if not loaded and abs(loss - expected) > START_TOLERANCE:
        wrong = "loss" if loss > expected else "initialisation"
        return f"WARNING  {text}: they should be close for random weights; the {wrong} is wrong"
    return f"sane     {text}"


def gradient_norms(norms: list[float], clip: float) -> str:
    """Judge the gradient norms: normally between 0.1 and 10, and rarely clipped."""
    finite = [n for n in norms if math.isfinite(n)]
    if not finite:
        return "WARNING  no step had a finite gradient norm: nothing was learnt"
    middle = statistics.median(finite)
    clipped = sum(n > clip for n in finite) / len(finite) if clip else 0.0
    text = f"gradient norm: median {middle:.3f}, largest {max(finite):.3f}, clipped in {clipped:.0%} of steps"
    if not NORM_RANGE[0] <= middle <= NORM_RANGE[1]:
        return f"WARNING  {text}; it normally lies between {NORM_RANGE[0]} and {NORM_RANGE[1]}"
    return f"WARNING  {text}; clipping should be the exception" if clipped > OFTEN else f"sane     {text}"


def memory(trainer: Trainer, peak_mib: float) -> str:
    """Compare the measured peak with the memory of weights, gradients and optimizer state, by count."""
    estimate = 0
    for share in trainer.shares:
        estimate += share.compute.nbytes
        if share.trainable:
            same = share.master is share.compute
            estimate += share.compute.nbytes + share.master.nbytes * (2 if same else 3)
    mib = estimate / 2**20
    what = "tensors" if trainer.mesh.device.type == "cuda" else "the whole process, Python and libraries included"
    needed = f"rank 0's weights, gradients and optimizer state need {mib:,.0f} MiB"
    text = f"peak memory {peak_mib:,.0f} MiB ({what}); {needed}"
    return f"sane     {text}" if peak_mib >= mib else f"WARNING  {text}: less than they need; the measurement is wrong"
