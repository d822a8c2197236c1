"""What checkpoints cost: `python -m benchmarks.checkpointing [--rounds N]`, as ratios within this one run, one process.

A step while a save goes on beside it, against a step without; saving and loading, against safetensors writing (and
syncing) and reading the same bytes. Which of the two comes first changes from round to round, and before each the disk
has finished with what was written so far.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.workload import StreamTask, Workload
from femto_checkpoint.store import CheckpointStore
from femto_core.launch import init_process_group, pick_device
from femto_core.sections import CheckpointSection
from femto_core.trainer import Trainer
from femto_tools.testing import make_trainer

ROUNDS = 6  # even, so that each comes first as often as the other


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def timed_both(first: Callable[[], object], second: Callable[[], object], *, swap: bool) -> tuple[float, float]:
    """Return the seconds of each, in this order or in the other, with nothing left to write before either."""
    seconds = [0.0, 0.0]
    for place, action in ((1, second), (0, first)) if swap else ((0, first), (1, second)):
        os.sync()
        seconds[place] = timed(action)
    return seconds[0], seconds[1]


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state under names: the bytes that a checkpoint holds."""
    found = {g.name: g.master.detach() for g in trainer.shares}
    for group in trainer.shares:
        for key, value in trainer.optimizer.state[group.master].items():
            found[f"{key}/{group.name}"] = value
    return found


def write_plainly(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read_plainly(tensors: dict[str, torch.Tensor], path: Path) -> None:
    found = load_file(path)  # maps the file; copying the values to where they are used is what reads it
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def beside(trainer: Trainer, store: CheckpointStore, folder: Path) -> tuple[float, float, float, int]:
    """Return seconds of a step without a save and of one beside a save, of the call itself, and steps it took."""
    without = statistics.median(timed(trainer.train_step) for _ in range(3))
    call = timed(lambda: store.save(folder, trainer.step, trainer.run_state(), on_failure=trainer.request_stop))
    steps: list[float] = []
    while store.saving or not steps:
        steps.append(timed(trainer.train_step))
    store.wait()
    return without, statistics.median(steps), call, len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each thing is measured")
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    init_process_group(pick_device())
    workload = Workload(steps=60 * rounds, warmup=2)
    settings = workload.settings(1)
    settings["train"]["dtype"] = "float32"
    trainer = make_trainer(settings, objects={"stream": StreamTask(workload)})
    trainer.train_step(), trainer.train_step()
    tensors = everything(trainer)
    size = sum(t.nbytes for t in tensors.values()) / 2**20
    store = CheckpointStore(trainer.mesh, CheckpointSection(keep=1), {})
    waiting = CheckpointStore(trainer.mesh, CheckpointSection(keep=1, wait=True), {})
    results: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        plain = folder / "plain.safetensors"
        for number in range(rounds):
            without, with_save, call, count = beside(trainer, store, folder / "beside")
            state, step = trainer.run_state(), trainer.step
            path = folder / "waiting" / f"step-{step}"
            swap = bool(number % 2)
            write, save = timed_both(
                functools.partial(write_plainly, tensors, plain),
                functools.partial(waiting.save, folder / "waiting", step, state),
                swap=swap,
            )
            read, load = timed_both(
                functools.partial(read_plainly, tensors, plain),
                functools.partial(waiting.load, path, state, weights_only=False),
                swap=swap,
            )
            results.append((with_save / without, call / without, save / write, load / read, count, save, load))
    names = (
        "step beside a save / step without",
        "the call itself / step without",
        "save and wait / safetensors save_file and fsync",
        "load and verify / safetensors load_file and copy",
    )
    print(f"{size:.0f} MiB of weights and optimizer state, 1 thread, torch {torch.__version__}\n")
    print("| ratio | median | in each round |\n|---|---|---|")
    for number, what in enumerate(names):
        ratios = [result[number] for result in results]
        print(f"| {what} | {statistics.median(ratios):.2f} x | {', '.join(f'{r:.2f}' for r in ratios)} |")
    lasted, save, load = (statistics.median(result[n] for result in results) for n in (4, 5, 6))
    print(f"\na save beside training lasted {lasted:.0f} steps; saved at {size / save:.0f} MiB/s, loaded at ", end="")
    print(f"{size / load:.0f} MiB/s")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
