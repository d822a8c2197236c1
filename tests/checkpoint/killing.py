"""`python -m tests.checkpoint.killing FOLDER KILLS SEED`: kill a training run again and again, and resume it each time.

This process imports torch once and forks a child for each life of the run, so that a kill costs a fraction of a second.
It prints a JSON line for each life: when it was killed, where it had begun, what it left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - once, here, instead of in every child

from femto_checkpoint.folder import latest_checkpoint
from femto_checkpoint.index import Checkpoint
from femto_core.launch import init_process_group
from femto_tools.testing import make_trainer
from tests.conftest import DropoutTask

STEPS = 24


def settings(folder: Path, workers: int = 0) -> dict[str, dict[str, Any]]:
    return {
        "run": {"dir": str(folder)},
        "train": {"steps": STEPS},
        "model": {"hidden_size": 64, "intermediate_size": 256},
        "data": {"micro_batch": 4, "workers": workers},
        "checkpoint": {"every": 2, "keep": 2, "keep_every": 10, "resume": "auto"},
    }


def live(folder: Path, pipe: int, workers: int) -> None:
    """Train to the end, in a child process; send the step it begins at through `pipe`."""
    init_process_group(torch.device("cpu"))
    trainer = make_trainer(settings(folder, workers), (), {"random_task": DropoutTask()})
    if workers:
        trainer.train_step()  # start the loader's processes before a kill is possible
    os.write(pipe, f"{trainer.step}\n".encode())
    trainer.train()
    torch.save({group.name: group.master for group in trainer.shares}, folder / "end.pt")


def begin(folder: Path, workers: int = 0) -> tuple[int, int]:
    """Fork a child that trains; return its process id and the step it begins at."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            live(folder, writing, workers)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        line = pipe.readline()
    if not line:
        os.waitpid(child, 0)
        raise SystemExit("the child did not get to train")
    return child, int(line)


def kill_after(child: int, delay: float) -> bool:
    """Kill `child` after `delay` seconds; return whether it had ended without an error before."""
    deadline = time.monotonic() + delay
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise SystemExit(f"the child ended with status {status}")
            return True
        time.sleep(min(0.002, max(0.0, deadline - time.monotonic())))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def newest(folder: Path) -> int:
    """Verify every byte of the newest checkpoint; return its step, or 0 without a checkpoint."""
    path = latest_checkpoint(folder / "test" / "checkpoints")
    if path is None:
        return 0
    checkpoint = Checkpoint(path)
    checkpoint.verify(checkpoint.index.files)
    return checkpoint.index.step


def same_end(folder: Path, straight: Path) -> bool:
    one, other = torch.load(folder / "end.pt"), torch.load(straight / "end.pt")
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def campaign(folder: Path, kills: int, seed: int) -> None:
    """Kill `kills` times, in as many runs as needed; each run is resumed to its end and compared."""
    moments = random.Random(seed)
    straight = folder / "straight"
    straight.mkdir(parents=True)
    child, _ = begin(straight)
    start = time.monotonic()
    if not kill_after(child, 120.0):
        raise SystemExit("the uninterrupted run did not end")
    longest = (time.monotonic() - start) / 2  # long enough for some progress on a busy machine
    done, number, expected, ended = 0, 0, 0, False
    while done < kills or not ended:
        run = folder / f"run-{number}"
        run.mkdir(exist_ok=True)
        child, first = begin(run)
        delay = moments.uniform(0.0, longest) if done < kills else 120.0
        ended = kill_after(child, delay)
        left = newest(run)
        line: dict[str, Any] = {"run": number, "began": first, "expected": expected, "ended": ended, "newest": left}
        line["after_ms"] = round(delay * 1e3)
        line["unfinished"] = len(list((run / "test" / "checkpoints").glob(".*")))
        if ended:
            line["same"] = same_end(run, straight)
            number, expected = number + 1, 0
        else:
            done, expected = done + 1, left
        print(json.dumps(line), flush=True)


def leave_workers(folder: Path) -> None:
    """Kill a run with loader processes, and resume it at once."""
    folder.mkdir(parents=True)
    child, _ = begin(folder, workers=2)
    kill_after(child, 0.05)
    start = time.monotonic()
    child, first = begin(folder, workers=2)
    print(json.dumps({"began": first, "waited_s": time.monotonic() - start}), flush=True)
    kill_after(child, 0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "workers":
        leave_workers(Path(sys.argv[1]))
    else:
        campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
