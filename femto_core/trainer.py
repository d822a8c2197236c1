"""The trainer: one step after the other; it never asks which plugin is on."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PretrainedConfig

from femto_core.checkpoint import Checkpointer, RunState, Stateful
from femto_core.config import Config
from femto_core.data import Collator, Dataset, DistributedDataLoader, evaluation_batches
from femto_core.hooks import Hooks
from femto_core.loss import Loss
from femto_core.mesh import DP, Mesh
from femto_core.metrics import Meter, StepInfo
from femto_core.model import Stage
from femto_core.optim import LRSchedule, clip_grads, grad_norm_squared, scale_lr
from femto_core.precision import MixedPrecisionManager, ParamGroup
from femto_core.schedule import Schedule
from femto_core.sharding import ShardingStrategy
from femto_core.sync import GradientSynchronizer

KERNEL_PARTS = ("trainer", "loader", "grad_sync", "rng")
"""The parts of a checkpoint that are the kernel's own."""


@attrs.define(kw_only=True)
class Trainer:
    """Trains a stage with the strategies it was given. Every method is called by all ranks alike."""

    config: Config
    mesh: Mesh
    hooks: Hooks
    run_dir: Path
    undo: contextlib.ExitStack
    """What `close` undoes last: the lock on the run's folder, which rank 0 holds."""
    stage: Stage
    schedule: Schedule
    collator: Collator
    loader: DistributedDataLoader
    dataset: Dataset
    held_out: Dataset
    loss: Loss
    precision: MixedPrecisionManager
    sharding: ShardingStrategy
    grad_sync: GradientSynchronizer
    groups: Sequence[ParamGroup]
    optimizer: torch.optim.Optimizer
    lr_schedule: LRSchedule
    checkpointer: Checkpointer
    meter: Meter
    plugin_versions: dict[str, str]
    plugin_parts: dict[str, Stateful]
    model_config: PretrainedConfig
    stop_requested: bool = False
    """Set (by a signal) on any rank, every rank stops after the step under way, having saved where it saves at all."""
    step: int = 0
    """Steps done so far."""
    skipped: int = 0
    """Of these, how many left the weights untouched."""
    tokens_seen: int = 0
    _stopping: bool = attrs.field(default=False, init=False)

    @property
    def end(self) -> int:
        """The last step to do: `train.steps`, or `train.stop_after` where that comes first."""
        return min(self.config.train.steps, self.config.train.stop_after or self.config.train.steps)

    def train(self) -> None:
        """Train up to the step `end`; evaluate, save and report on the way."""
        try:
            self.hooks.train_begin(self)
            while self.step < self.end and not self._stopping:
                self.hooks.step_begin(self.step + 1)
                info = self.train_step()
                self.hooks.step_end(info)  # before a save, which keeps what plugins have made of this step
                if self.mesh.rank == 0:
                    self.hooks.log(info.step, self._metrics(info))
                self._now_and_then(is_last=self.step == self.end)
            self.checkpointer.wait()
        finally:
            try:
                self.checkpointer.close()
            finally:
                self.hooks.train_end(self)

    def train_step(self) -> StepInfo:
        """Do one optimizer step over one global batch."""
        self.meter.start()
        micro_batches = self.loader.next_step()
        targets = sum(batch.valid for batch in micro_batches)
        tokens = self.mesh.sum(torch.tensor(targets, device=self.mesh.device), DP)
        # Gradients are sums, scaled once by the global count: any split of the batch gives the same gradient.
        scale = 1 / tokens.clamp(min=1).double()
        loss = self.schedule.run(self.stage, micro_batches, self.loss, scale, self.grad_sync)
        self.grad_sync.sync_gradients()
        self.sharding.reduce_grads()
        loss_sum, norm, self._stopping = self._reduce_numbers(loss)
        factor = self.lr_schedule(self.step)
        count = int(tokens)
        skip = not math.isfinite(norm) or count == 0
        if not skip:
            scale_lr(self.optimizer, factor)
            self.update(norm)
            self.sharding.gather_weights()
        self.precision.zero_grad(self.groups)
        self.sharding.post_step()
        self.step += 1
        self.skipped += skip
        self.tokens_seen += count
        return StepInfo(
            step=self.step,
            loss=loss_sum / count if count else math.nan,
            grad_norm=norm,
            lr=self.config.optim.lr * factor,
            tokens=count,
            skipped=skip,
            skipped_total=self.skipped,
            seconds=self.meter.stop(),
        )

    def update(self, norm: float) -> None:
        """Clip by the global `norm` and update, part after part: what has no gradient, the optimizer leaves alone."""
        for part in self.precision.parts(self.groups):
            self.precision.copy_grads_to_master(part)
            clip_grads(part, norm, self.config.optim.clip)
            self.optimizer.step()
            self.precision.sync_weights(part)
            self.precision.zero_grad(part)

    def evaluate(self) -> float:
        """Return the mean loss over the held-out rows' valid targets; each token weighs alike, whatever the batch."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        self.stage.train(False)
        for batch in evaluation_batches(
            self.held_out,
            self.collator,
            rows=min(len(self.held_out), self.config.eval.rows or len(self.held_out)),
            micro_batch=self.config.data.micro_batch,
            dp_size=self.mesh.size(DP),
            dp_rank=self.mesh.coordinate(DP),
        ):
            targets = batch.targets.to(self.mesh.device)
            total[0] += self.schedule.forward(self.stage, batch, functools.partial(self.loss, targets=targets))
            total[1] += batch.valid
        self.stage.train(True)
        loss_sum, count = self.mesh.sum(total, DP).tolist()
        return loss_sum / count if count else math.nan

    def save(self) -> None:
        """Save a checkpoint of the current step."""
        self.checkpointer.save(self.run_dir / "checkpoints", self.step, self.run_state())

    def resume(self, path: Path, *, weights_only: bool) -> None:
        """Go on from the checkpoint at `path`, or only take over its weights."""
        self.checkpointer.load(path, self.run_state(), weights_only=weights_only)
        self.precision.sync_weights(self.groups)
        self.sharding.gather_weights()

    def run_state(self) -> RunState:
        """Return everything that a checkpoint holds."""
        parts: dict[str, Stateful] = {"trainer": Counters(self), "loader": self.loader, "grad_sync": self.grad_sync}
        sampler = self.loader.sampler
        return RunState(
            groups=self.groups,
            optimizer=self.optimizer,
            parts={**parts, **self.plugin_parts},
            rank_parts={"rng": RandomGenerators(self.mesh.device)},
            identity={
                "data": self.dataset.fingerprint,
                "data.rows": sampler.rows,
                "data.seq_len": self.config.data.seq_len,
                "data.global_batch": sampler.global_batch,
                "data.remainder": sampler.remainder,
                "data.shuffle": sampler.shuffle,
                "train.seed": sampler.seed,
                "model.vocab_size": self.model_config.vocab_size,
            },
            plugins=self.plugin_versions,
            config=self.config.to_dict(),
            model_config=self.model_config,
            tokenizer_path=self.dataset.tokenizer_path,
        )

    def close(self) -> None:
        """Undo everything that was attached to the stage; end loader processes."""
        self.loader.close()
        self.grad_sync.close()
        self.sharding.close()
        self.schedule.close()
        self.undo.close()

    def _now_and_then(self, *, is_last: bool) -> None:
        every = self.config.checkpoint.every
        saves = every and (is_last or self._stopping or self.step % every == 0)
        if saves and self._stopping:
            self.save()  # first: whoever sent the signal may not wait for long
        every = self.config.eval.every
        if every and len(self.held_out) and (is_last or self.step % every == 0):
            loss = self.evaluate()
            if self.mesh.rank == 0:
                self.hooks.log(self.step, {"held_out_loss": loss})
        if saves and not self._stopping:
            self.save()

    def _reduce_numbers(self, loss: torch.Tensor) -> tuple[float, float, bool]:
        """Return loss sum, gradient norm and whether to stop, equal on every rank: one collective and one wait."""
        speaks = all(self.mesh.coordinate(axis.name) == 0 for axis in self.mesh.axes if axis.name != DP)
        mine = loss.double() if speaks else torch.zeros_like(loss, dtype=torch.float64)
        stop = torch.tensor(float(self.stop_requested), dtype=torch.float64, device=self.mesh.device)
        numbers = torch.stack([mine, grad_norm_squared(self.groups, self.mesh), stop])
        loss_sum, squared, stops = self.mesh.sum_world(numbers).tolist()
        return loss_sum, math.sqrt(squared) if squared >= 0 else math.nan, stops > 0

    def _metrics(self, info: StepInfo) -> dict[str, float]:
        metrics = {
            "loss": info.loss,
            "grad_norm": info.grad_norm,
            "lr": info.lr,
            "tokens": float(info.tokens),
            "skipped": float(info.skipped_total),
            "seconds": info.seconds,
        }
        return {**metrics, **self.meter.rates(info.seconds)}


class Counters:
    """The trainer's own numbers, as a part of a checkpoint."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self._trainer, name) for name in ("step", "skipped", "tokens_seen")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._trainer, name, value)


class RandomGenerators:
    """torch's random generators of one rank, as a part of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)
