"""What the kernel adds to a step: its trainer against a loop by hand over the same model, loss and optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.workload import StreamTask, Workload
from femto_core.launch import init_process_group, pick_device
from femto_tools.testing import make_trainer


def measure_overhead(pairs: int = 20) -> float:
    """Return the median of paired relative differences, in this process, one thread.

    A small model, so that a millisecond of the kernel's would show; steps alternate, so that drift hits both alike.
    """
    torch.set_num_threads(1)
    init_process_group(pick_device())
    workload = Workload(hidden=256, intermediate=704, layers=4, vocab=4096, steps=2 * pairs + 2, warmup=0)
    settings = workload.settings(1)
    settings["train"]["dtype"] = "float32"
    trainer = make_trainer(settings, objects={"stream": StreamTask(workload)})
    optimizer = trainer.optimizer
    parameters = [group.master for group in trainer.shares]

    def by_hand() -> float:
        total = 0.0
        micro_batches = trainer.loader.next_step()
        tokens = sum(batch.valid for batch in micro_batches)
        for batch in micro_batches:
            hidden = trainer.stage.forward(batch.input_ids, batch)
            loss = trainer.loss(hidden, trainer.stage.head, batch) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def timed(step: Callable[[], object]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    timed(trainer.train_step), timed(by_hand)
    ratios = [timed(trainer.train_step) / timed(by_hand) for _ in range(pairs)]
    trainer.close()
    dist.destroy_process_group()
    return statistics.median(ratios) - 1
