"""Several ranks of one command on this machine: what torchrun does, through torch's elastic agent in this process."""

from __future__ import annotations

import logging
import sys
import tempfile
import uuid
from collections.abc import Sequence
from typing import Any

PATIENCE_S = 90
"""After a signal a rank may have to end a step, and save."""


def run_ranks(nproc: int, words: Sequence[str]) -> tuple[int, str]:
    """Run `python WORDS` in `nproc` processes; return the exit code of the first that failed (0: none), and why.

    The reason is given only where the rank could not give one itself, since a signal ended it. The processes see the
    environment that torchrun would give them, and write to this process's output. Where one fails, the others are
    ended. A signal is passed on to all of them, and waited for.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say themselves what is wrong
    patience: dict[str, Any] = {"shutdown_timeout": PATIENCE_S}
    if "shutdown_timeout" not in getattr(LaunchConfig, "__dataclass_fields__", {}):  # older torch
        patience = {}
    with tempfile.TemporaryDirectory() as logs:
        launch: Any = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **patience,
        )
        try:
            elastic_launch(launch, sys.executable)(*words)
        except SignalException as stopped:
            return 128 + stopped.sigval, ""
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode >= 0:
                return failure.exitcode, ""
            memory = " (often the system's answer to a lack of memory)" if failure.signal_name() == "SIGKILL" else ""
            return 1, f"rank {rank} was ended by {failure.signal_name()}{memory}"
    return 0, ""
