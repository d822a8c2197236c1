"""Several ranks on this machine from one command: what torchrun does, through torch's elastic agent in this process."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from femto_core.errors import UserError


def start_ranks(nproc: int, words: Sequence[str]) -> int:
    """Run `femto` with `words` in `nproc` processes, and return the exit code of the first that failed, or 0.

    The processes see the environment that torchrun would give them, and write to this process's output. Where one
    fails, the others are ended. A signal is passed on to all of them, and waited for.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say themselves what is wrong
    os.environ.setdefault(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90"
    )  # after a signal a rank may have to end a step, and save
    with tempfile.TemporaryDirectory() as logs:
        launch: Any = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(launch, sys.executable)("-m", "femto_core", *words)
        except SignalException as stopped:
            return 128 + stopped.sigval
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                raise UserError(
                    f"rank {rank} was ended by {failure.signal_name()}"
                    + (" (often the system's answer to a lack of memory)" if failure.signal_name() == "SIGKILL" else "")
                ) from None
            return failure.exitcode
    return 0
