"""`femto memory`: counts what a run would need before it has the machines."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_report.trial import take_number, trial_of

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.data import Collator, Dataset
    from femto_core.plugins import Plugins

USAGE = (
    "Count one rank's peak memory by phase: [RUN.toml] [--plugins NAMES] [--ranks N] [--rank R] "
    "[--section.key value ...]. No other rank is needed: a step is computed here, on random rows, and nothing learnt."
)


def memory_command(words: Sequence[str]) -> int:
    """`femto memory [RUN.toml] [--plugins NAMES] [--ranks N] [--rank R] [--section.key value ...]`."""
    from femto_core.cli import quiet_libraries, read_run

    rest = list(words)
    ranks, rank = take_number(rest, "--ranks", 1), take_number(rest, "--rank", 0)
    if not 0 <= rank < ranks:
        raise UserError(f"--rank {rank} is none of the ranks 0 to {ranks - 1} that --ranks {ranks} makes")
    config, plugins = read_run("memory", rest, USAGE)
    plugins.manager.register(RandomRows())  # last, and so asked first, whoever else sits in the data seats
    if not config.model.path and not config.model.vocab_size:
        raise UserError("femto memory needs to know the vocabulary: set --model.vocab-size, or --model.path")
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        report(trial_of(config, folder), plugins, ranks, rank)
    return 0


class RandomRows:
    """Answers for the data seats: what the tokens are does not matter."""

    @hookimpl
    def femto_dataset(self, config: Config, split: str) -> Dataset:
        import json
        from pathlib import Path

        from femto_core.testing import RandomTask

        if config.model.path and not config.model.vocab_size:
            saved = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
            config = attrs.evolve(config, model=attrs.evolve(config.model, vocab_size=saved["vocab_size"]))
        return RandomTask(rows=4 * config.data.global_batch, masked=0.0).femto_dataset(config, split)

    @hookimpl
    def femto_collator(self) -> Collator:
        from femto_core.testing import stack_batches

        return stack_batches


def report(config: Config, plugins: Plugins, ranks: int, rank: int) -> None:
    """Build the run's trainer as one of `ranks` imagined ranks, do a step, and print its phases."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from femto_core.build import build_trainer
    from femto_core.mesh import pick_device
    from femto_ops.memory import counting
    from femto_report.phases import measure_step

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    device = pick_device()
    with counting(device) as counter:
        trainer = build_trainer(config, plugins)
        phases = measure_step(trainer, counter)
    trainer.close()
    rows = trainer.config.data.micro_batch
    count = len(trainer.loader.sampler.micro_batches(0))
    print(f"rank {rank} of {trainer.mesh}; a step is {count} x {rows} rows of {config.data.seq_len} tokens\n")
    print(f"{'phase':<10}{'peak MiB':>12}{'left after':>12}")
    for phase in phases:
        print(f"{phase.name:<10}{phase.peak / 2**20:>12,.1f}{phase.after / 2**20:>12,.1f}")
    print(f"\npeak {max(phase.peak for phase in phases) / 2**20:,.1f} MiB of tensors")
