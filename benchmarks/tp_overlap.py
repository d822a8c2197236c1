"""`torchrun --nproc-per-node 2 -m benchmarks.tp_overlap`: what overlap in a column layer's backward brings.

The same trainer does steps in turn with the sum of the input gradient under way beside the weights' products, as it
always is, and awaited before them.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.workload import StreamTask, Workload
from femto_core.launch import init_process_group, pick_device
from femto_core.trainer import Trainer
from femto_tools.testing import make_trainer
from femto_tp.ranks import Ranks

PAIRS = 10


def waiting(start: Any) -> Any:
    """Return `start` with the wait that its caller would defer."""

    def now(*arguments: Any) -> Any:
        started = start(*arguments)
        if isinstance(started, tuple):
            started[1].wait()
            return started[0], Arrived()
        started.wait()
        return Arrived()

    return now


class Arrived:
    def wait(self) -> None:
        pass


def timed(trainer: Trainer) -> float:
    dist.barrier()
    start = time.perf_counter()
    trainer.train_step()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    init_process_group(pick_device())
    workload = Workload(steps=2 * PAIRS + 1, warmup=0)
    for sequence_parallel in (False, True):
        settings = workload.settings(1)
        settings["train"]["dtype"] = "float32"
        settings["tp"] = {"size": dist.get_world_size(), "sequence_parallel": sequence_parallel}
        trainer = make_trainer(settings, ["bf16", "tp"], {"stream": StreamTask(workload)})
        timed(trainer)
        overlapped, in_turn = [], []
        for _ in range(PAIRS):
            overlapped.append(timed(trainer))
            with (
                mock.patch.object(Ranks, "start_sum", waiting(Ranks.start_sum)),
                mock.patch.object(Ranks, "start_scatter_sum", waiting(Ranks.start_scatter_sum)),
            ):
                in_turn.append(timed(trainer))
        if dist.get_rank() == 0:
            ratios = sorted(one / other for one, other in zip(in_turn, overlapped, strict=True))
            name = "sequence parallel" if sequence_parallel else "tensor parallel"
            print(
                f"{name}: {statistics.median(overlapped) * 1e3:.0f} ms a step; waiting first takes "
                f"{statistics.median(ratios):.3f} x that ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                flush=True,
            )
        trainer.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
