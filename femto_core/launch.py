"""How a process joins the others: its rank, its device, and the process group of the whole world.

Besides the command line, this is the only file that reads the environment: torchrun's LOCAL_RANK, LOCAL_WORLD_SIZE and
TORCHELASTIC_RUN_ID, and what `femto_ops.meeting.read_place` looks up in it.
"""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from femto_core.errors import UserError
from femto_ops.collectives import c10d
from femto_ops.meeting import meet, read_number, read_place

TIMEOUT_S = 1800.0
"""How long a rank waits for the others where no setting says so."""


def local_rank() -> int:
    """Return this process's number among the processes on its machine."""
    return _read("LOCAL_RANK", "0", 0)


def local_world_size() -> int:
    """Return how many processes of the run share this machine."""
    return _read("LOCAL_WORLD_SIZE", "1", 1)


def is_launched() -> bool:
    """Return whether torch's elastic launcher, which ends with its ranks, is this process's parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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


def init_process_group(device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
    """Join the world that torchrun describes in the environment; without torchrun, form a world of one process.

    A world of one is a process group like any other, so that no caller asks whether a process group exists. Raises
    `UserError` where the environment is wrong, the port is in use, or a rank is missing after `timeout_s` seconds.
    """
    store: Any = c10d.HashStore()
    try:
        place = read_place(os.environ)
        if place:
            store = meet(place, timeout_s, lambda text: print(f"femto: {text}", file=sys.stderr, flush=True))
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank if place else 0,
        world_size=place.world_size if place else 1,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def _read(name: str, default: str, least: int) -> int:
    try:
        return read_number(os.environ, name, default=default, least=least)
    except ValueError as error:
        raise UserError(str(error)) from None
