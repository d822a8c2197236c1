"""One contender in one run: `torchrun -m benchmarks.contender NAME`; rank 0 prints a JSON line of what it measured.

A name of `benchmarks.peers`, or femto with its plugins and settings: femto, femto+bf16+zero3, femto+pp+pp.schedule=zb.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist

from benchmarks.peers import PEERS
from benchmarks.workload import StreamTask, Workload
from femto_core.mesh import init_process_group, pick_device
from femto_core.metrics import peak_memory_mib
from femto_core.testing import make_trainer


def femto(workload: Workload, words: list[str]) -> Callable[[], float]:
    """femto's own trainer: plugins, and settings such as pp.schedule=zb."""
    plugins = [word for word in words if "=" not in word]
    given = [word.partition("=") for word in words if "=" in word]
    world = dist.get_world_size()
    dp = 1 if {"tp", "pp"} & {*plugins} else world
    settings = workload.settings(dp)
    settings["train"]["dtype"] = "float32"
    for plugin in {"tp", "pp"} & {*plugins}:
        settings[plugin] = {"size": world}
    for key, _, value in given:
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = {"true": True, "false": False}.get(
            value, int(value) if value.isdecimal() else value
        )
    trainer = make_trainer(settings, plugins, {"stream": StreamTask(workload)})
    return lambda: trainer.train_step().loss


def measure(step: Callable[[], float], workload: Workload) -> dict[str, float]:
    """Time each step between barriers; return the median's tokens per second, the peak memory, and the losses."""
    times, losses = [], []
    for number in range(workload.warmup + workload.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        dist.barrier()
        if number >= workload.warmup:
            times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    peak = torch.tensor(peak_memory_mib(pick_device()))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {
        "tokens_per_s": workload.batch * workload.seq / middle,
        "step_ms": middle * 1e3,
        "peak_mib": float(peak),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    torch.set_num_threads(1)
    init_process_group(pick_device())
    name = sys.argv[1]
    workload = attrs.evolve(Workload(), batch=int(sys.argv[2])) if len(sys.argv) > 2 else Workload()
    step = PEERS[name](workload) if name in PEERS else femto(workload, name.split("+")[1:])
    result = measure(step, workload)
    if dist.get_rank() == 0:
        print(json.dumps({"contender": name, "world": dist.get_world_size(), **result}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's teardown can hang after DDP


if __name__ == "__main__":
    main()
