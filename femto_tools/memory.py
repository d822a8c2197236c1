"""`femto memory`: counts what a run would need before it has the machines."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import attrs

from femto_core.cli import quiet_libraries
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive
from femto_tools.dry_run import trial_of

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.data import Collator, Dataset
    from femto_core.plugins import Plugins


@attrs.frozen(kw_only=True)
class MemoryOptions:
    """Count the peak memory of one rank by phase. One step on random rows is computed here, without other ranks."""

    ranks: int = attrs.field(default=1, validator=positive)
    """Ranks of the run."""
    rank: int = attrs.field(default=0, validator=not_negative)
    """The rank to count for, from 0."""


def memory_command(options: MemoryOptions, config: Config, plugins: Plugins) -> int:
    """Print the peak memory of each phase of a step."""
    ranks, rank = options.ranks, options.rank
    if rank >= ranks:
        raise UserError(f"--rank {rank} is none of the ranks 0 to {ranks - 1} that --ranks {ranks} makes")
    plugins.answer_first("random rows", RandomData())
    if not config.model.path and not config.model.vocab_size:
        raise UserError("femto memory needs to know the vocabulary: set --model.vocab-size, or --model.path")
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        report(trial_of(config, folder), plugins, ranks, rank)
    return 0


class RandomData:
    """Takes the data seats with random tokens: memory does not depend on which tokens they are."""

    @hookimpl
    def femto_dataset(self, config: Config, split: str) -> Dataset:
        from femto_core.architecture import read_model_config
        from femto_tools.testing import RandomTask

        if config.model.path and not config.model.vocab_size:
            vocab_size = read_model_config(config.model).vocab_size
            config = attrs.evolve(config, model=attrs.evolve(config.model, vocab_size=vocab_size))
        return RandomTask(rows=4 * config.data.global_batch, masked=0.0).femto_dataset(config, split)

    @hookimpl
    def femto_collator(self) -> Collator:
        from femto_tools.testing import stack_batches

        return stack_batches


def report(config: Config, plugins: Plugins, ranks: int, rank: int) -> None:
    """Build the run's trainer as one of `ranks` imagined ranks, do a step, and print its phases."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from femto_core.build import build_trainer
    from femto_core.launch import pick_device
    from femto_ops.memory import counting
    from femto_tools.phases import measure_step

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    device = pick_device()
    with counting(device) as counter:
        trainer = build_trainer(config, plugins)
        phases = measure_step(trainer, counter)
    trainer.close()
    rows = trainer.config.data.micro_batch
    count = trainer.loader.accumulation
    print(f"rank {rank} of {trainer.mesh}; a step is {count} x {rows} rows of {config.data.seq_len} tokens\n")
    print(f"{'phase':<10}{'peak MiB':>12}{'left after':>12}")
    for phase in phases:
        print(f"{phase.name:<10}{phase.peak / 2**20:>12,.1f}{phase.after / 2**20:>12,.1f}")
    print(f"\npeak {max(phase.peak for phase in phases) / 2**20:,.1f} MiB of tensors")
