"""The same model and step in other frameworks, as their documentation shows them: fp32 DDP; bf16 with fp32 masters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from benchmarks.workload import Workload
from femto_core.mesh import pick_device

Step = Callable[[], float]


def build(workload: Workload, dtype: torch.dtype) -> Any:
    """Return transformers' Llama, from the same seed on every rank."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(workload.llama())
    return model.to(pick_device(), dtype)


def micro_batches(workload: Workload) -> Iterator[torch.Tensor]:
    """Yield this rank's micro-batches of rows [micro, seq + 1]."""
    share = workload.batch // dist.get_world_size()
    micro = share // workload.accumulation
    first = dist.get_rank() * share
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
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=workload.lr, betas=(0.9, 0.95), fused=fused)
    stream = micro_batches(workload)

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
    model = build(workload, torch.bfloat16)
    if wrap:
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream = micro_batches(workload)

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
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream = micro_batches(workload)

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
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    model = build(workload, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    stream = micro_batches(workload)

    def step() -> float:
        total = torch.zeros((), device=pick_device())
        for _ in range(workload.accumulation):
            loss = loss_of(engine, next(stream))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / workload.accumulation
        return mean(total)

    return step


class MasterAdamW:
    """bf16 parameters and fp32 masters, where DDP does not keep the ranks alike: each may hold other parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, *, sums_over_ranks: bool) -> None:
        self._parameters = list(parameters)
        self._masters = [p.detach().float().clone() for p in self._parameters]
        self._sums_over_ranks = sums_over_ranks
        kinds = {type(master) for master in self._masters}  # DTensor and Tensor do not share a call
        make = torch.optim.AdamW
        self._optimizers = [
            make([m for m in self._masters if type(m) is kind], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
            for kind in kinds
        ]

    def step(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        norms: list[Any] = [torch.linalg.vector_norm(m.grad) for m in self._masters if m.grad is not None]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        square = torch.stack(whole).square().sum()
        if self._sums_over_ranks:
            dist.all_reduce(square)
        scale = float(torch.clamp(1.0 / (square.sqrt() + 1e-6), max=1.0))
        for master in self._masters:
            if master.grad is not None:
                master.grad.mul_(scale)
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)
                master.grad = None


def whole_batches(workload: Workload) -> Iterator[torch.Tensor]:
    """Yield micro-batches of all of the step's rows: for peers whose ranks see the same data."""
    micro = workload.batch // workload.accumulation
    for rows in workload.steps_of_rows():
        yield from torch.split(rows.to(pick_device()), micro)


def dtensor_tp(workload: Workload) -> Step:
    """torch's parallelize_module over DTensors."""
    model = build(workload, torch.bfloat16)
    mesh = init_device_mesh(pick_device().type, (dist.get_world_size(),))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    optimizer = MasterAdamW(model.parameters(), workload.lr, sums_over_ranks=False)
    stream = whole_batches(workload)

    def step() -> float:
        total = 0.0
        for _ in range(workload.accumulation):
            loss = loss_of(model, next(stream)) / workload.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        optimizer.step()
        return total

    return step


class PipelinePart(torch.nn.Module):
    """One rank's layers of transformers' Llama, for torch's pipelining."""

    def __init__(self, full: Any, rank: int, size: int) -> None:
        super().__init__()
        per = full.config.num_hidden_layers // size
        self.embed = full.model.embed_tokens if rank == 0 else None
        self.layers = torch.nn.ModuleList(full.model.layers[rank * per : (rank + 1) * per])
        self.rotary = full.model.rotary_emb
        self.norm = full.model.norm if rank == size - 1 else None
        self.head = full.lm_head if rank == size - 1 else None

    def forward(self, x: torch.Tensor) -> Any:
        hidden: Any = self.embed(x) if self.embed is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            output = layer(hidden, position_embeddings=rotary, position_ids=positions)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def torch_pipeline(workload: Workload, schedule: Any) -> Step:
    """torch.distributed.pipelining with one of its schedules."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = PipelinePart(build(workload, torch.bfloat16), rank, size)
    optimizer = MasterAdamW(part.parameters(), workload.lr, sums_over_ranks=True)

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    runner = schedule(
        PipelineStage(part, rank, size, pick_device()), n_microbatches=workload.accumulation, loss_fn=loss_fn
    )
    stream = workload.steps_of_rows()

    def step() -> float:
        rows = next(stream).to(pick_device())
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(rows[:, :-1])
        else:
            runner.step(target=rows[:, 1:], losses=losses)
        optimizer.step()
        total = torch.stack(losses).mean().float() if losses else torch.zeros((), device=pick_device())
        dist.broadcast(total, size - 1)
        return float(total)

    return step


def checkpointed_ddp(workload: Workload) -> Step:
    """The bf16 recipe with torch's checkpoint_wrapper around every layer."""
    return ddp_bf16(workload, wrap=True)


PEERS: dict[str, Callable[[Workload], Step]] = {
    "ddp": lambda workload: ddp(workload, fused=False),
    "ddp-fused": lambda workload: ddp(workload, fused=True),
    "ddp-bf16": ddp_bf16,
    "ddp-bf16-checkpoint": checkpointed_ddp,
    "dtensor-tp": dtensor_tp,
    "torch-1f1b": lambda workload: torch_pipeline(workload, Schedule1F1B),
    "torch-gpipe": lambda workload: torch_pipeline(workload, ScheduleGPipe),
    "fsdp2": fsdp2,
    "deepspeed-1": lambda workload: deepspeed(workload, 1),
    "deepspeed-2": lambda workload: deepspeed(workload, 2),
    "deepspeed-3": lambda workload: deepspeed(workload, 3),
}
