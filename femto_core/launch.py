"""How a process joins the others: its rank, its device, and the process group of the whole world.

Besides the command line, this is the only file that reads the environment: torchrun's RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE and TORCHELASTIC_RESTART_COUNT; and, through torch's rendezvous, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from femto_core.errors import UserError
from femto_ops.collectives import c10d


def local_rank() -> int:
    """Return this process's number among the processes on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return how many processes of the run share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share_machine(processes: int) -> None:
    """Have this process know that `processes` of its run share the machine, where no launcher has said so."""
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)


def pick_device() -> torch.device:
    """Return this process's device: the GPU of its local rank where there are GPUs and not gloo, otherwise the CPU."""
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cpu")
    if local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank()} has no GPU: this machine has {torch.cuda.device_count()}; "
            "start fewer processes on it (--nproc-per-node)"
        )
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def init_process_group(device: torch.device) -> None:
    """Join the world that torchrun describes in the environment; without torchrun, form a world of one process.

    A world of one is a process group like any other, so that no caller asks whether a process group exists.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=30)
    rank, world_size = 0, 1
    store: Any
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        if local_world_size() == world_size:
            # On one machine torchrun keeps its store over a restart, and with it the addresses of processes that died.
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = c10d.PrefixStore(f"restart-{restarts}", store)
    else:
        store = c10d.HashStore()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
