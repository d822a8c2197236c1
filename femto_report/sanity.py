"""A few numbers that tell a healthy run from a broken one, printed as a short report. Rank 0 only."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.trainer import Trainer

START_TOLERANCE = 0.5
"""How far from ln(vocabulary) a random model's first loss may lie: tied embeddings and wide init move it a little."""
LOADED_MARGIN = 1.0
NORM_RANGE = (0.1, 10.0)
OFTEN = 0.5


class SanityReport:
    """Checks the first loss against ln(vocabulary), the gradient norms, and memory against the estimate."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._norms: list[float] = []
        self._peak = 0.0

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if trainer.mesh.rank == 0:
            self._trainer, self._norms = trainer, []

    @hookimpl
    def femto_log(self, step: int, metrics: dict[str, float]) -> None:
        if self._trainer is None or "loss" not in metrics:
            return
        if step == 1:
            print(first_loss(self._trainer, metrics["loss"]), flush=True)
        self._norms.append(metrics["grad_norm"])
        self._peak = metrics["peak_memory_mib"]

    @hookimpl
    def femto_train_end(self) -> None:
        if self._trainer is not None and self._norms:
            print(gradient_norms(self._norms, self._trainer.config.optim.clip))
            print(memory(self._trainer, self._peak), flush=True)
        self._trainer = None


def first_loss(trainer: Trainer, loss: float) -> str:
    """Judge the loss before the first update: a random model knows nothing, a loaded one must know something."""
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
    """Judge the gradient norms: normally within 0.1 and 10, and clipped only now and then."""
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
    """Set the measured peak beside what weights, gradients and optimizer state need by count."""
    estimate = 0
    for group in trainer.groups:
        estimate += group.compute.nbytes
        if group.trainable:
            same = group.master is group.compute
            estimate += group.compute.nbytes + group.master.nbytes * (2 if same else 3)
    mib = estimate / 2**20
    what = "tensors" if trainer.mesh.device.type == "cuda" else "the whole process, Python and libraries included"
    text = f"peak memory {peak_mib:,.0f} MiB ({what}); what rank 0 updates needs {mib:,.0f} MiB"
    return f"sane     {text}" if peak_mib >= mib else f"WARNING  {text}: less than they need; the measurement is wrong"
