"""The same model and step in torch's tensor parallelism and pipelines: alone, and in pairs on 2 x 2 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers import Step, build, loss_of, micro_batches
from benchmarks.workload import Workload
from femto_core.launch import pick_device


class MasterAdamW:
    """bf16 parameters and fp32 masters (or fp32 ones alone), where ranks may hold different parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, *, sums_over: Any = None) -> None:
        """`sums_over`: the group over which squares of the norm add up, if its ranks hold different parameters."""
        self._parameters = list(parameters)
        self._masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self._parameters]
        self._sums_over = sums_over
        kinds: dict[Any, list[Any]] = {}
        for master in self._masters:  # DTensors of different meshes do not share a call, nor with plain tensors
            kinds.setdefault(master.device_mesh if isinstance(master, DTensor) else None, []).append(master)
        make = torch.optim.AdamW
        self._optimizers = [
            make(each, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True) for each in kinds.values()
        ]

    def step(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter:
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        norms: list[Any] = [torch.linalg.vector_norm(m.grad) for m in self._masters if m.grad is not None]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        square = torch.stack(whole).square().sum()
        if self._sums_over is not None:
            dist.all_reduce(square, group=self._sums_over)
        scale = float(torch.clamp(1.0 / (square.sqrt() + 1e-6), max=1.0))
        for master in self._masters:
            if master.grad is not None:
                master.grad.mul_(scale)
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                master.grad = None


def cut(model: Any, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    """Cut a Llama as torch's tutorial on tensor parallelism does; with `sequence`, the rows between blocks too.

    Logits stay cut, for `loss_parallel`.
    """
    whole, rows = Replicate(), Shard(1)
    out: dict[str, Any] = {"output_layouts": rows, "use_local_output": False} if sequence else {}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    layer_plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    layer_plan |= {name: RowwiseParallel(**out) for name in ("self_attn.o_proj", "mlp.down_proj")}
    head: dict[str, Any] = {"input_layouts": rows} if sequence else {}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, **out),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False, **head),
    }
    if sequence:
        attention: dict[str, Any] = {
            "input_kwarg_layouts": {"hidden_states": rows},
            "desired_input_kwarg_layouts": {"hidden_states": whole},
        }
        layer_plan |= {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(**attention, use_local_output=True),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole, use_local_output=True),
        }
        plan["model.norm"] = SequenceParallel()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, layer_plan)
    parallelize_module(model, mesh, plan)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def accumulated(model: Any, stream: Iterator[torch.Tensor], workload: Workload) -> torch.Tensor:
    """Do forward and backward of a step's micro-batches of a model whose logits are cut; return the mean loss."""
    total = torch.zeros((), device=pick_device())
    for number in range(workload.accumulation):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == workload.accumulation - 1)
        with loss_parallel():
            loss = loss_of(model, next(stream)) / workload.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        total += whole_of(loss.detach())
    return total


def dtensor_tp(workload: Workload, *, sequence: bool) -> Step:
    """torch's parallelize_module over DTensors, on all ranks."""
    model = build(workload, workload.narrow_dtype)
    cut(model, init_device_mesh(pick_device().type, (dist.get_world_size(),)), sequence=sequence)
    optimizer = MasterAdamW(model.parameters(), workload.lr)
    stream = micro_batches(workload, 0, 1)  # all ranks see the same rows

    def step() -> float:
        total = accumulated(model, stream, workload)
        optimizer.step()
        return float(total)

    return step


def fsdp2_tp(workload: Workload) -> Step:
    """fully_shard along the first axis of a mesh of 2 x 2 ranks, parallelize_module along the second."""
    mesh = init_device_mesh(pick_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(workload, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=workload.narrow_dtype, reduce_dtype=workload.narrow_dtype)
    cut(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = MasterAdamW(model.parameters(), workload.lr)
    stream = micro_batches(workload, mesh.get_local_rank("dp"), 2)

    def step() -> float:
        total = accumulated(model, stream, workload)
        optimizer.step()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        return float(total) / 2

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


def torch_pipeline(workload: Workload, schedule: Any, *, chunks: int = 1, other: str = "") -> Step:
    """torch.distributed.pipelining with one of its schedules; on 2 x 2 ranks with `other`, "fsdp" or "tp", beside it.

    (DistributedDataParallel fails under it: its buckets do not take two forwards before a backward.)
    """
    world = dist.get_world_size()
    beside = 2 if other else 1
    mesh = init_device_mesh(pick_device().type, (world // beside, beside), mesh_dim_names=("pp", "other"))
    rank, size = mesh.get_local_rank("pp"), world // beside
    full = build(workload, torch.float32 if other == "fsdp" else workload.narrow_dtype)
    numbers = [rank + size * chunk for chunk in range(chunks)]
    if other == "tp":
        cut(full, mesh["other"])
    parts: list[Any] = [PipelinePart(full, number, size * chunks) for number in numbers]
    if other == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=workload.narrow_dtype, reduce_dtype=workload.narrow_dtype)
        for module in [module for part in parts for module in (*part.layers, part)]:
            fully_shard(module, mesh=mesh["other"], mp_policy=policy, reshard_after_forward=False)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = MasterAdamW(parameters, workload.lr, sums_over=mesh.get_group("pp"))

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    stages = [
        PipelineStage(part, number, size * chunks, pick_device(), group=mesh.get_group("pp"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    runner = schedule(stages if chunks > 1 else stages[0], n_microbatches=workload.accumulation, loss_fn=loss_fn)
    dp_rank, dp_size = (mesh.get_local_rank("other"), 2) if other == "fsdp" else (0, 1)

    def shares() -> Iterator[torch.Tensor]:
        for rows in workload.steps_of_rows():
            yield rows.chunk(dp_size)[dp_rank].to(pick_device())

    stream = shares()

    def step() -> float:
        rows = next(stream)
        losses: list[torch.Tensor] = []
        is_last = rank == size - 1
        aim: dict[str, Any] = {"target": rows[:, 1:], "losses": losses} if is_last else {}
        with loss_parallel() if other == "tp" else contextlib.nullcontext():
            runner.step(*[rows[:, :-1]] * (rank == 0), **aim)
        optimizer.step()
        losses = [whole_of(loss) for loss in losses]
        total = torch.stack(losses).mean().float() if losses else torch.zeros((), device=pick_device())
        dist.all_reduce(total)  # of the last stage's ranks
        return float(total) / beside

    return step


MODEL_PARALLEL: dict[str, Callable[[Workload], Step]] = {
    "dtensor-tp": lambda workload: dtensor_tp(workload, sequence=False),
    "dtensor-sp": lambda workload: dtensor_tp(workload, sequence=True),
    "fsdp2-tp": fsdp2_tp,
    "torch-1f1b": lambda workload: torch_pipeline(workload, Schedule1F1B),
    "torch-1f1b-fsdp2": lambda workload: torch_pipeline(workload, Schedule1F1B, other="fsdp"),
    "torch-1f1b-tp": lambda workload: torch_pipeline(workload, Schedule1F1B, other="tp"),
    "torch-interleaved": lambda workload: torch_pipeline(workload, ScheduleInterleaved1F1B, chunks=2),
    "torch-zb": lambda workload: torch_pipeline(workload, ScheduleInterleavedZeroBubble, chunks=2),
    "torch-gpipe": lambda workload: torch_pipeline(workload, ScheduleGPipe),
}
