"""Counting memory: exact for what is known, and by phase; `femto memory` for ranks that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from femto_ops.memory import LiveBytes, counting
from femto_tools.phases import Phase, measure_step
from femto_tools.testing import WorkerPool, make_trainer

CPU = torch.device("cpu")
MIB = 2**20


def test_what_is_made_lives_and_dies_is_counted_to_the_byte() -> None:
    with LiveBytes(CPU) as counter:
        a = torch.empty(1000, dtype=torch.float64)
        assert counter.live() == 8000
        view = a[10:20].view(2, 5)
        b = torch.zeros(500, dtype=torch.bfloat16)
        assert counter.live() == 9000, "a view has no memory of its own"
        del a
        assert counter.live() == 9000, "the view keeps its base's storage"
        del view
        assert counter.live() == 1000
        assert counter.take_peak() == 9000
        assert counter.take_peak() == 1000, "the peak begins anew"
        b.untyped_storage().resize_(0)
        assert counter.live() == 0, "emptied in place"
        b.untyped_storage().resize_(1000)
        assert counter.live() == 1000
        meta = torch.empty(1000, device="meta")
        assert counter.live() == 1000, "not of this device"
        del meta


def test_what_was_there_before_is_not_counted_nor_are_views_of_it() -> None:
    before = torch.ones(1000)
    with LiveBytes(CPU) as counter:
        view = before.view(10, 100).t()
        assert counter.live() == 0
        copy = view.contiguous()
        assert counter.live() == 4000
        before.mul_(2)
        assert counter.live() == 4000
        del copy


def test_what_autograd_saves_counts_until_backward_is_over() -> None:
    with LiveBytes(CPU) as counter:
        x = torch.ones(100, requires_grad=True)
        y = x.exp()  # saves its result
        loss = y.sum()
        del y
        assert counter.live() == 2 * 400 + 4
        torch.autograd.backward(loss)
        del loss
        assert counter.live() == 2 * 400, "x and its gradient"


def test_operations_inside_a_custom_backward_are_seen() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch.empty(10_000).sum() * grads[0]

    with LiveBytes(CPU) as counter:
        x = torch.ones(1, requires_grad=True)
        y: Any = Greedy.apply(x)  # type: ignore[no-untyped-call]
        counter.take_peak()
        torch.autograd.backward(y)
        assert counter.take_peak() >= 40_000


def phases_of(plugins: tuple[str, ...], dtype: str) -> list[Phase]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 4, "vocab_size": 64}
    values = {"train": {"dtype": dtype}, "model": {**sizes, "tied": False}, "data": {"micro_batch": 8}}
    with counting(CPU) as counter:
        trainer = make_trainer(values, plugins)
        return measure_step(trainer, counter)


def test_a_real_step_needs_weights_gradients_and_optimizer_state_and_leaves_no_gradient(pool: WorkerPool) -> None:
    forward, backward, update = pool.run(1, phases_of, (), "float32")[0]
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 64 * 64
    floor = 4 * parameters
    assert [forward.name, backward.name, update.name] == ["forward", "backward", "update"]
    assert 3 * floor < forward.peak < 3 * floor + 700_000, "weights, two moments, activations of 64 tokens"
    assert 4 * floor <= backward.after < 4.1 * floor, "and gradients, but no activations any more"
    assert 4 * floor <= update.peak < 4.1 * floor + 10_000
    assert 3 * floor <= update.after < 3.1 * floor + 10_000, "no gradient is left"


def femto(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "femto_core", "memory", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_counts_for_ranks_that_are_not_there() -> None:
    settings = ("--model.vocab-size", "64", "--data.seq-len", "16", "--data.global-batch", "64")
    done = femto("--ranks", "8", "--rank", "3", "--plugins", "zero3", *settings)
    assert done.returncode == 0, done.stderr
    assert "rank 3 of dp 8; a step is 1 x 8 rows of 16 tokens" in done.stdout
    found = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()[3:6]}
    assert found.keys() == {"forward", "backward", "update"}
    assert all(value > 0 for value in found.values())
    assert f"peak {max(found.values()):,.1f} MiB of tensors" in done.stdout


def test_random_rows_take_the_place_of_a_plugins_own(tmp_path: Path) -> None:
    settings = ("--model.vocab-size", "64", "--data.seq-len", "16", "--data.global-batch", "8")
    done = femto("--plugins", "sft", "--sft.path", "none.jsonl", "--sft.tokenizer", "none", *settings)
    assert done.returncode == 0, done.stderr
    assert "a step is 1 x 8 rows of 16 tokens" in done.stdout


def test_settings_that_a_trial_has_no_use_for_are_no_obstacle(tmp_path: Path) -> None:
    settings = ("--model.vocab-size", "64", "--data.seq-len", "16", "--data.global-batch", "8", "--data.workers", "2")
    done = femto(*settings, "--checkpoint.resume", str(tmp_path), "--checkpoint.weights-only")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "8"], "set --model.vocab-size, or --model.path"),
        (["--ranks", "x"], "--ranks = 'x' (on the command line): must be a whole number"),
        (["--ranks"], "--ranks needs a value"),
        (["--ranks", "2", "--rank", "2"], "--rank 2 is none of the ranks 0 to 1"),
        (
            ["--model.vocab-size", "64", "--data.global-batch", "16", "--ranks", "3"],
            "not a multiple of 3 data-parallel ranks",
        ),
    ],
)
def test_what_the_command_cannot_count_gets_one_sentence(words: list[str], sentence: str) -> None:
    done = femto(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
