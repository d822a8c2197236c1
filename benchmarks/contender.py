"""One contender in one run: `torchrun -m benchmarks.contender NAME`; rank 0 prints a JSON line of what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from benchmarks.workload import StreamTask, Workload
from femto_core.mesh import init_process_group, pick_device
from femto_core.metrics import peak_memory_mib
from femto_core.testing import make_trainer

Step = Callable[[], float]


def femto(workload: Workload) -> Step:
    """femto's own trainer, with its defaults."""
    objects = {"stream": StreamTask(workload)}
    settings = workload.settings(dist.get_world_size())
    settings["train"]["dtype"] = "float32"
    trainer = make_trainer(settings, objects=objects)
    return lambda: trainer.train_step().loss


def ddp(workload: Workload, *, fused: bool) -> Step:
    """torch's DistributedDataParallel around transformers' Llama, AdamW and clip_grad_norm_, as in their docs."""
    torch.manual_seed(0)
    device = pick_device()
    model: Any = LlamaForCausalLM(workload.llama())
    model.to(device)
    world, rank = dist.get_world_size(), dist.get_rank()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=workload.lr, betas=(0.9, 0.95), fused=fused)
    share = workload.batch // world
    stream = micro_batches(workload, rank * share, share)

    def step() -> float:
        total = torch.zeros((), device=device)
        for number in range(workload.accumulation):
            rows = next(stream).to(device)
            last = number == workload.accumulation - 1
            sync = contextlib.nullcontext() if last or world == 1 else wrapped.no_sync()
            with sync:
                logits = wrapped(input_ids=rows[:, :-1]).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten()) / workload.accumulation
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(total)
        return float(total) / world

    return step


def micro_batches(workload: Workload, first: int, share: int) -> Iterator[torch.Tensor]:
    """Yield this rank's micro-batches of rows [micro, seq + 1]."""
    micro = share // workload.accumulation
    for rows in workload.steps_of_rows():
        for start in range(first, first + share, micro):
            yield rows[start : start + micro]


CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    "femto": femto,
    "ddp": lambda workload: ddp(workload, fused=False),
    "ddp-fused": lambda workload: ddp(workload, fused=True),
}


def measure(step: Step, workload: Workload) -> dict[str, float]:
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
    device = pick_device()
    init_process_group(device)
    workload = Workload()
    result = measure(CONTENDERS[sys.argv[1]](workload), workload)
    if dist.get_rank() == 0:
        print(json.dumps({"contender": sys.argv[1], "world": dist.get_world_size(), **result}), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's teardown can hang after DDP


if __name__ == "__main__":
    main()
