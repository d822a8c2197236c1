"""A pool of gloo workers for tests: processes that stay, jobs that come with a process group of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 5.0
"""How long the other ranks may take to answer once one has failed."""


class WorkerFailedError(AssertionError):
    """A worker raised, died or did not answer; the text has the traceback of each worker that failed."""


class Workers:
    """Processes that wait for jobs. Starting them takes seconds, a job milliseconds: keep one for a whole session."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Forked from a process that has loaded all there is to load, but started nothing: no thread, no device.
        can_fork = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if can_fork else "spawn")
        self._context.set_forkserver_preload(["femto_tools.testing", "transformers.models.llama.modeling_llama"])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """Call `function(*arguments)` on ranks 0 to `world_size` - 1 of a new gloo process group; return all results.

        `function` must be importable (defined at the top of a module). Raises `WorkerFailedError`.
        """
        if world_size > self.size:
            raise ValueError(f"a job for {world_size} ranks does not fit a pool of {self.size} workers")
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world_size):
                job = pickle.dumps((function, arguments, rank, world_size, str(Path(folder) / "store")))
                self._pipes[rank].send_bytes(job)
            answers = self._receive(world_size, timeout_s)
        failures = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close()  # the ranks that did not fail may be waiting for the others
            raise WorkerFailedError("\n".join(failures))
        return [value for _, value in answers]

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        while len(self._processes) < self.size:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _receive(self, world_size: int, timeout_s: float) -> list[tuple[bool, Any]]:
        """Return all ranks' answers; once one has failed, the others, who may wait for it, have `GRACE_S` left."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < world_size:
            pipes = {self._pipes[rank]: rank for rank in range(world_size) if rank not in answers}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= dict.fromkeys(pipes.values(), (False, f"no answer (the limit is {timeout_s} s)"))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipes[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    answers[pipes[pipe]] = False, "the worker died"
            if any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return [answers[rank] for rank in range(world_size)]


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        answer: tuple[bool, Any]
        try:
            function, arguments, rank, world_size, store = pickle.loads(job)
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
            dist.barrier()  # a short job must not hang up while another rank is still being connected
            try:
                answer = True, function(*arguments)
                with contextlib.suppress(RuntimeError, ValueError):  # another rank failed, or the job left the group
                    dist.barrier()  # nor while another is still being connected to a group that the job built
            finally:
                dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - sent to the test, which fails with it
            answer = False, traceback.format_exc()
        sys.stdout.flush()
        pipe.send_bytes(pickle.dumps(answer))
