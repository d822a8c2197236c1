"""One contender in one run: `torchrun -m benchmarks.contender NAME [ROWS [DTYPE]]`.

Rank 0 prints a JSON line of what it measured.

A name of `benchmarks.peers` or `benchmarks.parallel_peers`, or femto with its plugins and settings: femto,
femto+bf16+zero3, femto+pp+pp.schedule=zb.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist

from benchmarks.parallel_peers import MODEL_PARALLEL
from benchmarks.peers import DATA_PARALLEL
from benchmarks.workload import StreamTask, Workload
from femto_core.launch import init_process_group, pick_device
from femto_ops.memory import peak_memory_mib
from femto_tools.testing import make_trainer

PEERS = DATA_PARALLEL | MODEL_PARALLEL


def femto(workload: Workload, words: list[str]) -> Callable[[], float]:
    """femto's own trainer: plugins, and settings such as pp.schedule=zb; tp and pp take all ranks unless told."""
    if workload.narrow == "float32":
        words = [word for word in words if word.partition(".")[0] != "bf16"]
    plugins = [word for word in words if "=" not in word]
    given = [word.partition("=") for word in words if "=" in word]
    world = dist.get_world_size()
    values = {key: value for key, _, value in given}
    sizes = {axis: int(values.pop(f"{axis}.size", world)) for axis in ("tp", "pp") if axis in plugins}
    settings = workload.settings(world // math.prod(sizes.values()))
    settings["train"]["dtype"] = "float32"
    settings |= {axis: {"size": size} for axis, size in sizes.items()}
    for key, value in values.items():
        section, _, name = key.partition(".")
        known: dict[str, Any] = {"true": True, "false": False}
        settings.setdefault(section, {})[name] = known.get(value, int(value) if value.isdecimal() else value)
    trainer = make_trainer(settings, plugins, {"stream": StreamTask(workload)})
    return lambda: trainer.train_step().loss


def measure(step: Callable[[], float], workload: Workload) -> dict[str, float]:
    """Time each step between barriers.

    Returns the median's tokens per second, the processor time of a step over all ranks (its median on each), the peak
    memory, and the losses.
    """
    times, processor, losses = [], [], []
    for number in range(workload.warmup + workload.steps):
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        losses.append(step())
        used = time.process_time() - busy
        dist.barrier()
        if number >= workload.warmup:
            times.append(time.perf_counter() - start)
            processor.append(used)
    middle = statistics.median(times)
    peak, used_by_all = torch.tensor(peak_memory_mib(pick_device())), torch.tensor(statistics.median(processor))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    dist.all_reduce(used_by_all)
    return {
        "tokens_per_s": workload.batch * workload.seq / middle,
        "step_ms": middle * 1e3,
        "processor_ms": float(used_by_all) * 1e3,
        "peak_mib": float(peak),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    torch.set_num_threads(1)
    init_process_group(pick_device())
    name = sys.argv[1]
    workload = attrs.evolve(Workload(), batch=int(sys.argv[2])) if len(sys.argv) > 2 else Workload()
    workload = attrs.evolve(workload, narrow=sys.argv[3]) if len(sys.argv) > 3 else workload
    step = PEERS[name](workload) if name in PEERS else femto(workload, name.split("+")[1:])
    result = measure(step, workload)
    if dist.get_rank() == 0:
        print(json.dumps({"contender": name, "world": dist.get_world_size(), **result}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's teardown can hang after DDP


if __name__ == "__main__":
    main()
