"""The end of pipelines: closed ones leave nothing behind, and a rank that fails ends the others within seconds."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from femto_tools.testing import WorkerPool, make_trainer
from tests.cli.commands import TINY_FLAGS, femto, install_plugin
from tests.cli.conftest import dataset as dataset
from tests.core.test_replicated import tensor_bytes
from tests.pp.tasks import Values, merged, pipeline
from tests.zero.test_closing import hooks_left

EARLY = 5
SMALL: Values = {
    "model": {"layers": 2, "hidden_size": 8, "heads": 2, "kv_heads": 1},
    "data": {"micro_batch": 4},
}


def build_and_close(values: Values, builds: int) -> dict[str, Any]:
    sizes, threads, files, groups, hooks, alive = [], [], [], [], 0, 0
    for number in range(1, builds + 1):
        trainer = make_trainer(values, ("pp",))
        if number in (1, EARLY, builds):
            trainer.train_step()
        trainer.close()
        hooks += hooks_left(trainer)
        del trainer
        if number in (EARLY, builds):
            gc.collect()
            sizes.append(tensor_bytes())
            names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
            threads.append(len(names))
            alive = sum("pipeline" in name for name in names)
            files.append(len(os.listdir("/proc/self/fd")))
            groups.append(len(dist.distributed_c10d._world.pg_map))
    return {"hooks": hooks, "alive": alive, "sizes": sizes, "threads": threads, "files": files, "groups": groups}


@pytest.mark.parametrize("builds", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_many_pipelines_leave_no_hook_no_tensor_and_no_thread_of_their_own(pool: WorkerPool, builds: int) -> None:
    """torch never frees all resources of a process group, so threads and files may grow in proportion to the groups."""
    try:
        for seen in pool.run(2, build_and_close, merged(SMALL, pipeline("1f1b")), builds, timeout_s=300):
            assert seen["hooks"] == seen["alive"] == 0
            assert seen["sizes"][1] <= seen["sizes"][0]
            early, late = seen["groups"]
            per_build = (late - early) / (builds - EARLY)
            assert per_build <= 6
            for what in ("threads", "files"):
                early, late = seen[what]
                assert late - early <= 16 * per_build * (builds - EARLY), (what, seen)
    finally:
        pool.close()  # after hundreds of groups, the next test starts with fresh workers


FAILS = """
import os
import torch
from femto_core.hookspecs import hookimpl

class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("rank one has failed")

calls = 0

@hookimpl
def femto_wrap_layer(name, layer):
    forward = layer.forward
    def failing(hidden, **others):
        global calls
        calls += torch.is_grad_enabled()
        if os.environ["RANK"] != "1" or calls != 6:
            return forward(hidden, **others)
        if WHERE == "forward":
            raise ArithmeticError("rank one has failed")
        return Breaks.apply(forward(hidden, **others))
    layer.forward = failing
"""
FLAGS = (*TINY_FLAGS, "--model.layers", "3", "--data.micro-batch", "1")


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_rank_that_raises_mid_step_ends_all_within_seconds(dataset: Path, tmp_path: Path, where: str) -> None:
    environment = install_plugin(tmp_path / "site", "fails", FAILS.replace("WHERE", repr(where)))
    start = time.monotonic()
    flags = [*FLAGS, "--data.path", str(dataset), "--plugins", "pp,fails", "--pp.size", "3", "--pp.schedule", "zb"]
    done = femto(flags, tmp_path, environment, processes=3)
    assert done.code != 0
    assert "[rank 1] Traceback" in done.err
    assert "ArithmeticError: rank one has failed" in done.err
    assert "[rank 0] Traceback" not in done.err
    assert "[rank 2] Traceback" not in done.err
    assert time.monotonic() - start < 90, "start-up included"


@pytest.mark.slow
def test_the_command_line_trains_and_records_the_last_rank_s_loss_on_rank_0(dataset: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--data.path", str(dataset), "--eval.every", "2", "--checkpoint.every", "2"]
    assert femto([*flags, "--run.name", "one"], tmp_path).code == 0
    more = ["--plugins", "pp", "--pp.size", "2", "--pp.schedule", "interleaved", "--pp.layers", "0,2,1,0"]
    done = femto([*flags, *more, "--run.name", "two"], tmp_path, processes=2)
    assert done.code == 0, done.err
    one, two = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == len(two) >= 4
    for mine, theirs in zip(one, two, strict=True):
        for key in ("step", "loss", "grad_norm", "held_out_loss", "lr", "tokens"):
            if key in mine:
                assert theirs[key] == pytest.approx(mine[key], rel=1e-4), key
    samples = [(tmp_path / "runs" / name / "samples.jsonl").read_text().count("\n") for name in ("one", "two")]
    assert samples[0] == samples[1] > 0
