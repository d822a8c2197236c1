"""The trainer: one step after the other; it never asks which plugin is on."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from transformers import PretrainedConfig

from femto_core import hookspecs
from femto_core.batch import Batch
from femto_core.checkpoint import Checkpointer, Counters, RandomGenerators, RunState, Stateful
from femto_core.config import Config
from femto_core.data import Collator, Dataset, Loader, evaluation_batches
from femto_core.errors import UserError
from femto_core.grad_norm import clip_grads, grad_norm_squared
from femto_core.hooks import Hooks
from femto_core.loss import BatchLoss, TaskLoss, TokenStatistics
from femto_core.mesh import Mesh
from femto_core.metrics import Meter, StepInfo
from femto_core.model import Stage
from femto_core.optim import LRSchedule, scale_lr
from femto_core.precision import ParamShare, Precision
from femto_core.schedule import Schedule
from femto_core.sharding import ShardingStrategy
from femto_ops.isolation import DocumentCheck

KERNEL_PARTS = ("trainer", "loader", "rng")
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
    loader: Loader
    dataset: Dataset
    held_out: Dataset
    statistics: TokenStatistics
    task: TaskLoss
    precision: Precision
    sharding: ShardingStrategy
    shares: Sequence[ParamShare]
    update_groups: Sequence[Sequence[ParamShare]]
    """The shares in groups that are updated one after the other; as many groups on every rank."""
    optimizer: torch.optim.Optimizer
    lr_schedule: LRSchedule
    checkpointer: Checkpointer
    meter: Meter
    plugin_versions: dict[str, str]
    plugin_parts: dict[str, Stateful]
    model_config: PretrainedConfig
    step: int = 0
    """Steps done so far."""
    skipped: int = 0
    """Steps among these that left the weights untouched."""
    tokens_seen: int = 0
    loss: BatchLoss = attrs.field(init=False)
    """The task's loss with the statistics that it works on."""
    _documents: DocumentCheck = attrs.field(init=False)
    _stop_requested: bool = attrs.field(default=False, init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _micro_batches: int = attrs.field(default=0, init=False)
    """The number of micro-batches that every rank had in the step before."""

    def __attrs_post_init__(self) -> None:
        self.loss = functools.partial(self.task, self.statistics)
        self._documents = DocumentCheck(self.stage.module)

    @property
    def end(self) -> int:
        """The last step to do: `train.steps`, or `train.stop_after` where that comes first."""
        return min(self.config.train.steps, self.config.train.stop_after or self.config.train.steps)

    def request_stop(self) -> None:
        """Have all ranks stop after the step in progress; a checkpoint is saved first if checkpoints are enabled.

        One rank's request is enough. It may come from a signal handler or from another thread.
        """
        self._stop_requested = True

    def train(self) -> None:
        """Train up to the step `end`; evaluate, save and report on the way."""
        error: BaseException | None = None
        try:
            self.hooks.call(hookspecs.femto_train_begin, trainer=self)
            while self.step < self.end and not self._stopping:
                self.hooks.call(hookspecs.femto_step_begin, trainer=self, step=self.step + 1)
                info = self.train_step()
                # Before a save, so that it holds the plugins' state after this step.
                self.hooks.call(hookspecs.femto_step_end, trainer=self, info=info)
                self._log(info.step, self._metrics(info))
                self._evaluate_and_save(is_last=self.step == self.end)
            self.checkpointer.wait()
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                self.checkpointer.close()
            except BaseException as raised:
                error = error or raised
                raise
            finally:
                self.hooks.call(hookspecs.femto_train_end, trainer=self, error=error)

    def train_step(self) -> StepInfo:
        """Do one optimizer step over one global batch."""
        self.meter.start()
        micro_batches = self.loader.next_step()
        counts = self._count(micro_batches)
        loss_sum, norm = self.forward_backward(micro_batches, counts[1])
        tokens, weight = self._read(counts)
        factor = self.lr_schedule(self.step)
        skip = not math.isfinite(norm) or not weight
        if not skip:
            self.update(norm, factor)
        self.end_step()
        self.step += 1
        self.skipped += skip
        self.tokens_seen += int(tokens)
        return StepInfo(
            step=self.step,
            loss=loss_sum / weight if weight else math.nan,
            grad_norm=norm,
            lr=self.config.optim.lr * factor,
            tokens=int(tokens),
            skipped=skip,
            skipped_total=self.skipped,
            seconds=self.meter.stop(),
        )

    def forward_backward(self, micro_batches: Sequence[Batch], weight: torch.Tensor) -> tuple[float, float]:
        """Compute the gradients of the mean loss; return the global loss sum and gradient norm.

        Gradients are sums, scaled once by 1 / `weight` (global, float64 scalar): any split of the batch gives the same.
        """
        self.precision.zero_grad(self.shares)  # where a step has failed, and the caller goes on
        scale = torch.where(weight > 0, 1 / weight, 1)
        loss = self.schedule.run(self.stage, micro_batches, self.loss, scale, self.sharding)
        self.sharding.finish_gradients()
        loss_sum, norm, self._stopping = self._reduce_numbers(loss)
        return loss_sum, norm

    def update(self, norm: float, lr_factor: float) -> None:
        """Clip by the global `norm` and update the weights, one group of shares after the other."""
        scale_lr(self.optimizer, lr_factor)
        for shares in self.update_groups:
            self.precision.copy_grads_to_master(shares)
            clip_grads(shares, norm, self.config.optim.clip)
            self.optimizer.step()  # leaves alone what has no gradient
            self.precision.sync_weights(shares)
            self.precision.zero_grad(shares)
        self.sharding.weights_changed()

    def end_step(self) -> None:
        """Drop the gradients, and what only this step needed."""
        self.precision.zero_grad(self.shares)
        self.sharding.post_step()

    def evaluate(self) -> float:
        """Return the mean loss over the held-out rows; each row or token weighs alike, whatever the batch size."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        with self.stage.evaluating():
            for batch in evaluation_batches(
                self.held_out,
                self.collator,
                rows=min(len(self.held_out), self.config.eval.rows or len(self.held_out)),
                micro_batch=self.config.data.micro_batch,
                size=self.mesh.size(*self.mesh.row_axes),
                rank=self.mesh.coordinate(*self.mesh.row_axes),
            ):
                loss = functools.partial(self.loss, batch=batch.to(self.mesh.device))
                total[0] += self.schedule.forward(self.stage, batch, loss)
                total[1] += self.task.weight(batch)
        loss_sum, weight = self.mesh.sum(total, *self.mesh.data_axes).tolist()
        return loss_sum / weight if weight else math.nan

    def save(self) -> None:
        """Save a checkpoint of the current step; where it cannot be written, all ranks stop."""
        folder = self.run_dir / "checkpoints"
        self.checkpointer.save(folder, self.step, self.run_state(), on_failure=self.request_stop)

    def resume(self, path: Path, *, weights_only: bool) -> None:
        """Continue from the checkpoint at `path`, or only take over its weights."""
        self.checkpointer.load(path, self.run_state(), weights_only=weights_only)
        if self.step > self.config.train.steps:
            raise UserError(f"{path} is of step {self.step}, beyond train.steps = {self.config.train.steps}")
        self.precision.sync_weights(self.shares)
        self.sharding.weights_changed()

    def run_state(self) -> RunState:
        """Return everything that a checkpoint holds."""
        counters = Counters(self, ("step", "skipped", "tokens_seen"))
        return RunState(
            shares=self.shares,
            optimizer=self.optimizer,
            parts={"trainer": counters, "loader": self.loader, **self.plugin_parts},
            rank_parts={"rng": RandomGenerators(self.mesh.device)},
            identity={
                **self.loader.identity,
                "data.seq_len": self.config.data.seq_len,
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
        self.sharding.close()
        self.schedule.close()
        self.undo.close()

    def _count(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the global batch's valid targets and its weight (float64 [2]).

        Raises `UserError` where ranks have different numbers of micro-batches: some would wait forever; and where rows
        hold several documents, which the model does not keep apart.
        """
        if problem := self._documents.problem_of(micro_batches):
            raise UserError(f"step {self.step + 1} has rows of several documents, but {problem}")
        count = len(micro_batches)
        weights = [self.task.weight(batch) for batch in micro_batches]
        weight = sum(weights) if all(0 <= weight < math.inf for weight in weights) else math.nan
        mine = [sum(batch.valid for batch in micro_batches), weight] if self.mesh.speaks else [0, 0]
        numbers = torch.tensor([*mine, count, count**2], dtype=torch.float64, device=self.mesh.device)
        total = self.mesh.sum_world(numbers)
        # On a GPU, reading a number waits for all that is queued: only where this rank's own count has changed.
        if count != self._micro_batches or self.mesh.device.type == "cpu":
            *_, counts, squares = total.tolist()
            if counts**2 != squares * self.mesh.world_size:
                raise UserError(
                    f"step {self.step + 1}: the loader made {count} micro-batches on rank {self.mesh.rank}, and "
                    f"{int(counts)} on all {self.mesh.world_size} ranks together; it must make as many on every rank"
                )
            self._micro_batches = count
        return total[:2]

    def _read(self, counts: torch.Tensor) -> tuple[float, float]:
        """Return the numbers of `_count`. Raises `UserError` on all ranks where a micro-batch's weight is no weight."""
        tokens, weight = counts.tolist()
        if not math.isfinite(weight):
            raise UserError(
                f"step {self.step + 1}: weight(batch) of the loss must be finite, 0 or more, for every micro-batch"
            )
        return tokens, weight

    def _evaluate_and_save(self, *, is_last: bool) -> None:
        def is_due(every: int) -> bool:
            return bool(every) and (is_last or self.step % every == 0)

        saves_first = self._stopping and bool(self.config.checkpoint.every)
        if saves_first:  # the sender of a signal may not wait for an evaluation
            self.save()
        if is_due(self.config.eval.every) and len(self.held_out):
            self._log(self.step, {"held_out_loss": self.evaluate()})
        if is_due(self.config.checkpoint.every) and not saves_first:
            self.save()

    def _reduce_numbers(self, loss: torch.Tensor) -> tuple[float, float, bool]:
        """Return loss sum, gradient norm and whether to stop, equal on every rank: one collective and one wait."""
        mine = loss.double() if self.mesh.speaks else torch.zeros_like(loss, dtype=torch.float64)
        stop = torch.tensor(float(self._stop_requested), dtype=torch.float64, device=self.mesh.device)
        numbers = torch.stack([mine, grad_norm_squared(self.shares, self.mesh), stop])
        loss_sum, squared, stops = self.mesh.sum_world(numbers).tolist()
        return loss_sum, math.sqrt(squared) if squared >= 0 else math.nan, stops > 0

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self.mesh.rank == 0:
            self.hooks.call(hookspecs.femto_log, trainer=self, step=step, metrics=metrics)

    def _metrics(self, info: StepInfo) -> dict[str, float]:
        metrics = {name: float(getattr(info, name)) for name in ("loss", "grad_norm", "lr", "tokens", "seconds")}
        return {**metrics, "skipped": float(info.skipped_total), **self.meter.rates(info.seconds)}
