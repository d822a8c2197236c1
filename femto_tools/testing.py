"""For tests, femto's own and plugin authors': a pool of gloo workers, and the parity of any layout with one process.

pool = WorkerPool(4)
one = pool.train(1, values)
four = pool.train(4, {**values, "mine": {"size": 2}}, plugins=("mine",))
assert worst_difference(one, four) < 1e-9
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from femto_core import hookspecs
from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.build import build_trainer
from femto_core.config import config_class, make_config
from femto_core.hooks import Hooks
from femto_core.hookspecs import hookimpl
from femto_core.layout import ParamLayout
from femto_core.plugins import activate
from femto_core.trainer import Trainer
from femto_tools.workers import Workers

QUIET = tuple(f"no:{info.name}" for info in activate([]).active if "observe" in info.roles <= {"observe", "setup"})
"""Blocks the built-in plugins that only look on."""
TINY: dict[str, Any] = {
    "train": {"steps": 6, "dtype": "float64", "threads": 1},
    "model": {"hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 32},
    "data": {"seq_len": 8, "global_batch": 8, "micro_batch": 1},
    "optim": {"warmup": 1, "lr": 1e-2},
    "eval": {"every": 0},
}
"""Settings of a model that trains in milliseconds, in float64."""


@attrs.frozen(kw_only=True)
class Record:
    """The numbers of one training run, which must be the same in every layout. Tensors are global, by full name."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """Gradients of each step, after clipping."""
    weights: dict[str, torch.Tensor]


class WorkerPool(Workers):
    """Workers that also know how to train."""

    def train(
        self, world_size: int, values: Mapping[str, Any], *, plugins: Sequence[str] = (), timeout_s: float = 120.0
    ) -> Record:
        """Train with settings `values` (over `TINY`) on random rows; return what all ranks did, put together."""
        return assemble(self.run(world_size, train_job, dict(values), tuple(plugins), timeout_s=timeout_s))


@attrs.frozen
class RandomTask:
    """A plugin that takes the data seats: random rows with a share of their targets masked, in some rows all."""

    rows: int = 64
    masked: float = 0.3
    documents: int = 1
    """Documents in a row, of about the same length, with restarting positions."""

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        seed = {"train": 0, "held_out": 1}[split]
        return RandomRows(self, config.data.seq_len, config.model.vocab_size, seed)

    @hookimpl
    def femto_collator(self) -> Callable[[Sequence[Any]], Batch]:
        return stack_batches


@attrs.frozen
class RandomRows:
    """Row i is decided by i and the seed alone."""

    task: RandomTask
    seq_len: int
    vocab_size: int
    seed: int
    tokenizer_path: Path = Path("none")

    @property
    def fingerprint(self) -> str:
        return f"random {self.seed}"

    def __len__(self) -> int:
        return self.task.rows

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.task.rows:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        row = torch.randint(self.vocab_size, (1, self.seq_len + 1), generator=generator)
        share = 1.0 if index % 5 == 4 and self.task.masked else self.task.masked
        hidden = torch.rand(1, self.seq_len, generator=generator) < share
        document_ids = torch.arange(self.seq_len)[None] * self.task.documents // self.seq_len
        starts = torch.searchsorted(document_ids[0].contiguous(), document_ids[0].contiguous())
        return Batch(
            input_ids=row[:, :-1],
            targets=row[:, 1:].masked_fill(hidden, IGNORE_INDEX),
            position_ids=(torch.arange(self.seq_len) - starts)[None],
        )


def stack_batches(samples: Sequence[Batch]) -> Batch:
    """Put batches on top of one another, extra tensors included."""

    def stack(read: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        return torch.cat([read(sample) for sample in samples])

    return Batch(
        input_ids=stack(lambda sample: sample.input_ids),
        targets=stack(lambda sample: sample.targets),
        position_ids=stack(lambda sample: sample.position_ids),
        extra={name: stack(lambda sample, name=name: sample.extra[name]) for name in samples[0].extra},  # type: ignore[misc]
    )


def make_trainer(
    values: Mapping[str, Any], plugins: Sequence[str] = (), objects: Mapping[str, object] | None = None
) -> Trainer:
    """Build a trainer in this process (whose process group exists) from `values` over `TINY`; quiet, in float64.

    If `values` name no folder for the run, closing the trainer removes the folder that it is given.
    """
    given = {"random_task": RandomTask()} if objects is None else dict(objects)
    active = activate([*QUIET, *plugins], objects=given)
    hooks = Hooks(active.manager)
    with contextlib.ExitStack() as undo:
        run_dir = [undo.enter_context(tempfile.TemporaryDirectory(prefix="femto-test-", ignore_cleanup_errors=True))]
        dist.broadcast_object_list(run_dir)  # all write to rank 0's
        merged = {name: {**TINY.get(name, {}), **values.get(name, {})} for name in {*TINY, *values}}
        merged["run"] = {"dir": run_dir[0], "name": "test", **merged.get("run", {})}
        config = make_config(config_class(hooks.config_sections()), merged, {}, "", hooks.config_defaults())
        hooks.call(hookspecs.femto_validate, config=config)
        trainer = build_trainer(config, active)
        trainer.undo.push(undo.pop_all())
    return trainer


def train_job(values: Mapping[str, Any], plugins: Sequence[str], task: RandomTask | None = None) -> dict[str, Any]:
    """Train on random rows as a worker's job; return this rank's part of a `Record`."""
    return record_training(make_trainer(values, plugins, {"random_task": task or RandomTask()}))


def record_training(trainer: Trainer) -> dict[str, Any]:
    """Train to the end and close; return this rank's part of a `Record`."""
    gradients: list[dict[str, torch.Tensor]] = []

    def keep(*_: Any) -> None:  # called for each part of the parameters that is updated together
        gradients[-1] |= {s.name: s.master.grad.clone() for s in trainer.shares if s.master.grad is not None}

    handle = trainer.optimizer.register_step_pre_hook(keep)
    infos = []
    trainer.hooks.call(hookspecs.femto_train_begin, trainer=trainer)
    for _ in range(trainer.end):  # so many more steps, wherever a resumed trainer stands
        gradients.append({})
        trainer.hooks.call(hookspecs.femto_step_begin, trainer=trainer, step=trainer.step + 1)
        infos.append(trainer.train_step())
        trainer.hooks.call(hookspecs.femto_step_end, trainer=trainer, info=infos[-1])
    trainer.hooks.call(hookspecs.femto_train_end, trainer=trainer, error=None)
    handle.remove()
    part = {
        "losses": [info.loss for info in infos],
        "norms": [info.grad_norm for info in infos],
        "layouts": {s.name: s.layout for s in trainer.shares},
        "gradients": gradients,
        "weights": {s.name: s.master.detach().clone() for s in trainer.shares},
    }
    trainer.close()
    return part


def assemble(parts: Sequence[Mapping[str, Any]]) -> Record:
    """Put the ranks' parts together into global tensors. Raises where ranks disagree or leave a gap."""
    for part in parts[1:]:
        for key in ("losses", "norms"):
            mine, first = (torch.tensor(p[key], dtype=torch.float64) for p in (part, parts[0]))
            torch.testing.assert_close(mine, first, rtol=0, atol=0, equal_nan=True, msg=f"ranks disagree about {key}")
    steps = len(parts[0]["gradients"])
    return Record(
        losses=parts[0]["losses"],
        norms=parts[0]["norms"],
        gradients=[_whole([(p["layouts"], p["gradients"][step]) for p in parts]) for step in range(steps)],
        weights=_whole([(p["layouts"], p["weights"]) for p in parts]),
    )


def _whole(parts: Sequence[tuple[Mapping[str, ParamLayout], Mapping[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for layouts, tensors in parts:
        for name, tensor in tensors.items():
            layout, flat, start = layouts[name], tensor.flatten(), 0
            target = whole.setdefault(layout.name, torch.zeros(layout.global_shape, dtype=tensor.dtype))
            mask = seen.setdefault(layout.name, torch.zeros(layout.global_shape, dtype=torch.bool))
            for box in layout.owned():
                values = flat[start : start + box.numel].view(box.sizes)
                before = target[box.slices()][mask[box.slices()]]
                if not torch.equal(before, values[mask[box.slices()]]):
                    raise AssertionError(f"ranks hold different values of {layout.name}")
                target[box.slices()], mask[box.slices()] = values, True
                start += box.numel
    gaps = [name for name, mask in seen.items() if not mask.all()]
    if gaps:
        raise AssertionError(f"no rank owns all of {gaps[0]}")
    return whole


def worst_difference(one: Record, other: Record) -> float:
    """Return the largest relative difference in losses, norms, gradients and weights, each against its largest.

    Infinite where only one of the two has a value, or a finite one; NaN equals NaN (the loss of nothing to learn).
    """
    pairs = [
        (torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))
        for mine, theirs in ((one.losses, other.losses), (one.norms, other.norms))
    ]
    for mine, theirs in zip([*one.gradients, one.weights], [*other.gradients, other.weights], strict=True):
        assert mine.keys() == theirs.keys(), "the runs have different parameters"
        pairs.extend((mine[name], theirs[name]) for name in mine)
    return max(relative_difference(a, b) for a, b in pairs)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest value in `b`."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    finite = a.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    gap, size = (a - b)[finite].abs(), b[finite].abs()
    return float(gap.max() / size.max().clamp(min=1e-12)) if gap.numel() else 0.0
