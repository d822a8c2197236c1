"""The same model and step in other frameworks that shard data, as their documentation shows them: in fp32, or in bf16
with fp32 masters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from benchmarks.workload import Workload
from femto_core.launch import pick_device

Step = Callable[[], float]


def build(workload: Workload, dtype: torch.dtype) -> Any:
    """Return transformers' Llama, from the same seed on every rank."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(workload.llama())
    return model.to(pick_device(), dtype)


def micro_batches(workload: Workload, rank: int, size: int) -> Iterator[torch.Tensor]:
    """Yield the micro-batches of rows [micro, seq + 1] that one of `size` ranks along the data's axis sees."""
    share = workload.batch // size
    micro = share // workload.accumulation
    first = rank * share
    for rows in workload.steps_of_rows():
        for start in range(first, first + share, micro):
            yield rows[start : start + micro].to(pick_device())


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss."""
    logits = model(input_ids=rows[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def mean(total: torch.Tensor) -> float:
    """Return the mean over ranks."""
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def ddp(workload: Workload, *, fused: bool) -> Step:
    """torch's DistributedDataParallel in fp32, AdamW and clip_grad_norm_."""
    model = build(workload, torch.float32)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=workload.lr, betas=(0.9, 0.95), fused=fused)
    stream = micro_batches(workload, dist.get_rank(), dist.get_world_size())

    def step() -> float:
        total = accumulate(wrapped, model, stream, workload)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return mean(total)

    return step


def accumulate(wrapped: Any, model: Any, stream: Iterator[torch.Tensor], workload: Workload) -> torch.Tensor:
    """Do forward and backward of a step's micro-batches under DDP; return the mean loss."""
    total = torch.zeros((), device=pick_device())
    for number in range(workload.accumulation):
        last = number == workload.accumulation - 1
        with contextlib.nullcontext() if last or wrapped is model else wrapped.no_sync():
            loss = loss_of(wrapped, next(stream)) / workload.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def ddp_bf16(workload: Workload, *, wrap: bool = False) -> Step:
    """DDP with bf16 weights and fp32 masters: the recipe that a user would write by hand."""
    model = build(workload, workload.narrow_dtype)
    if wrap:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if dist.get_world_size() > 1 else model
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream = micro_batches(workload, dist.get_rank(), dist.get_world_size())

    def step() -> float:
        total = accumulate(wrapped, model, stream, workload)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
                master.grad = None
        return mean(total)

    return step


def fsdp2(workload: Workload) -> Step:
    """torch's fully_shard on every layer, bf16 compute and reduction, fused AdamW."""
    mesh = init_device_mesh(pick_device().type, (dist.get_world_size(),))
    model = build(workload, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=workload.narrow_dtype, reduce_dtype=workload.narrow_dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream = micro_batches(workload, dist.get_rank(), dist.get_world_size())

    def step() -> float:
        total = torch.zeros((), device=pick_device())
        for number in range(workload.accumulation):
            model.set_requires_gradient_sync(number == workload.accumulation - 1)
            loss = loss_of(model, next(stream)) / workload.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return mean(total)

    return step


def deepspeed(workload: Workload, stage: int) -> Step:
    """DeepSpeed with bf16 and a ZeRO stage. On a CPU it needs DS_ACCELERATOR=cpu."""
    import deepspeed as ds  # not everybody has it

    config = {
        "train_micro_batch_size_per_gpu": workload.batch // dist.get_world_size() // workload.accumulation,
        "gradient_accumulation_steps": workload.accumulation,
        "bf16": {"enabled": workload.narrow == "bfloat16"},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    model = build(workload, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    stream = micro_batches(workload, dist.get_rank(), dist.get_world_size())

    def step() -> float:
        total = torch.zeros((), device=pick_device())
        for _ in range(workload.accumulation):
            loss = loss_of(engine, next(stream))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / workload.accumulation
        return mean(total)

    return step


def checkpointed_ddp(workload: Workload) -> Step:
    """The bf16 recipe with torch's checkpoint_wrapper around every layer."""
    return ddp_bf16(workload, wrap=True)


DATA_PARALLEL: dict[str, Callable[[Workload], Step]] = {
    "ddp": lambda workload: ddp(workload, fused=False),
    "ddp-fused": lambda workload: ddp(workload, fused=True),
    "ddp-bf16": ddp_bf16,
    "ddp-bf16-checkpoint": checkpointed_ddp,
    "fsdp2": fsdp2,
    "deepspeed-1": lambda workload: deepspeed(workload, 1),
    "deepspeed-2": lambda workload: deepspeed(workload, 2),
    "deepspeed-3": lambda workload: deepspeed(workload, 3),
}
