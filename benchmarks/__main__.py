"""`make bench`: one table of every mode beside every peer that has it, and the ratios within this one run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from benchmarks.overhead import measure_overhead
from benchmarks.workload import Workload
from femto_core.launch import pick_device

ROUNDS = 3
ALIKE = {"first_loss": 0.1, "last_loss": 0.1}
"""Largest difference between the losses of two contenders: they begin with different random weights. A larger one means
different work."""


@attrs.frozen
class Entry:
    """A contender, its number of ranks, and its rows per step."""

    contender: str
    ranks: int = 2
    batch: int = Workload().batch

    def __str__(self) -> str:
        return f"{self.contender} on {self.ranks}" + (f", {self.batch} rows" if self.batch != Workload().batch else "")

    @property
    def runs_here(self) -> bool:
        """Whether the packages of the contender are installed."""
        return not self.contender.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


PLAIN, ZERO1, ZERO2, ZERO3 = (Entry(f"femto{plugins}") for plugins in ("", "+bf16+zero1", "+bf16+zero2", "+bf16+zero3"))
PAIRS = {
    "fp32": [(PLAIN, Entry("ddp")), (PLAIN, Entry("ddp-fused"))],
    "zero": [
        (Entry("femto+bf16"), Entry("ddp-bf16")),
        (Entry("femto+bf16+bf16.accumulate_dtype=bfloat16"), Entry("ddp-bf16")),  # as DDP sums micro-batches
        (ZERO1, Entry("deepspeed-1")),
        (ZERO2, Entry("deepspeed-2")),
        (ZERO3, Entry("fsdp2")),
        (ZERO3, Entry("deepspeed-3")),
    ],
    "model parallel": [
        (Entry("femto+bf16+tp"), Entry("dtensor-tp")),
        (Entry("femto+bf16+tp+tp.sequence_parallel=true"), Entry("dtensor-sp")),
        (Entry("femto+bf16+pp"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.layers=balanced"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.schedule=gpipe"), Entry("torch-gpipe")),
        (Entry("femto+bf16+pp+pp.schedule=interleaved"), Entry("torch-interleaved")),
        (Entry("femto+bf16+pp+pp.schedule=zb"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.schedule=zb+pp.layers=balanced"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.schedule=zb"), Entry("torch-zb")),
    ],
    "checkpointing": [(Entry("femto+bf16+sac"), Entry("ddp-bf16-checkpoint"))],
    "combinations": [
        (Entry("femto+bf16+tp+tp.size=2", ranks=4), Entry("fsdp2-tp", ranks=4)),
        (Entry("femto+bf16+zero3+tp+tp.size=2", ranks=4), Entry("fsdp2-tp", ranks=4)),
        (Entry("femto+bf16+pp+pp.size=2", ranks=4), Entry("torch-1f1b-fsdp2", ranks=4)),
        (Entry("femto+bf16+zero2+pp+pp.size=2", ranks=4), Entry("torch-1f1b-fsdp2", ranks=4)),
        (Entry("femto+bf16+tp+pp+tp.size=2+pp.size=2", ranks=4), Entry("torch-1f1b-tp", ranks=4)),
    ],
}
"""Parts of the table by name: femto, and the peer it is measured against. Where bf16 is slow, all run in fp32."""
SCALING = {"fp32": [Entry("femto", ranks=1), Entry("femto", ranks=1, batch=Workload().batch // 2)]}
"""What two ranks are compared with, twice its speed: one rank that does the whole step, or one rank's share of it."""


def cost_of_bf16(size: int = 512, repeats: int = 5) -> float:
    """Return how long a product of bf16 matrices takes, as a multiple of the same in fp32; the best of `repeats`."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.ones(size, size, dtype=dtype, device=pick_device()) for _ in range(2))
        times[dtype] = min(timeit.repeat(lambda a=a, b=b: float((a @ b)[0, 0]), number=3, repeat=repeats))  # type: ignore[misc]
    return times[torch.bfloat16] / times[torch.float32]


def pairs_of(name: str, narrow: str) -> list[tuple[Entry, Entry]]:
    """Return the pairs of a part that run here; in fp32 two settings of bf16 are one."""
    pairs = [pair for pair in PAIRS[name] if pair[1].runs_here]
    return pairs if narrow == "bfloat16" else [pair for pair in pairs if "+bf16." not in pair[0].contender]


def run(entry: Entry, narrow: str) -> dict[str, Any]:
    """Run one contender in processes of its own, one thread each; return what it measured."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entry.ranks)]
    done = subprocess.run(
        [*launcher, "-m", "benchmarks.contender", entry.contender, str(entry.batch), narrow],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{entry} failed:\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure(name: str, rounds: int, narrow: str) -> list[str]:
    """Run one set's contenders `rounds` times in turn; return a line of the table for each pair."""
    pairs = pairs_of(name, narrow)
    alone = SCALING.get(name, [])
    entries = list(dict.fromkeys(entry for pair in pairs for entry in pair)) + alone
    results: dict[Entry, list[dict[str, Any]]] = {entry: [] for entry in entries}
    for _ in range(rounds):
        for entry in entries:
            results[entry].append(run(entry, narrow))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    lines = [line(ours, theirs, results, 1) for ours, theirs in pairs]
    return lines + [line(PLAIN, one, results, PLAIN.ranks) for one in alone]


def line(ours: Entry, theirs: Entry, results: dict[Entry, list[dict[str, Any]]], times: int) -> str:
    """Set one contender beside `times` another: medians of both, and the ratio in each round, whose runs were close."""

    def middle(entry: Entry, key: str) -> float:
        value: float = statistics.median(r[key] for r in results[entry])
        return value

    a, b = results[ours], results[theirs]
    for key, most in ALIKE.items() if ours.batch == theirs.batch else ():
        if abs(middle(ours, key) - middle(theirs, key)) > most:
            raise SystemExit(f"{ours} and {theirs} differ in {key}: {middle(ours, key)} and {middle(theirs, key)}")
    ratios = [x["tokens_per_s"] / y["tokens_per_s"] / times for x, y in zip(a, b, strict=True)]
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    peer = f"{times} x {theirs}" if times > 1 else str(theirs)
    speeds = f"{middle(ours, 'tokens_per_s'):.0f} | {peer} | {middle(theirs, 'tokens_per_s'):.0f}"
    peaks = [middle(entry, "peak_mib") for entry in (ours, theirs)]
    busy = [x["processor_ms"] / y["processor_ms"] for x, y in zip(a, b, strict=True)]
    processor = f"{statistics.median(busy):.3f} x" if times == 1 else ""
    memory = f"{peaks[0]:.0f} : {peaks[1]:.0f} | {peaks[0] / peaks[1]:.2f} x"
    return f"| {ours} | {speeds} | {statistics.median(ratios):.3f} x ({each}) | {processor} | {memory} |"


def processor_name() -> str:
    """Return the name of the GPU or the processor, with the instructions that decide how fast bf16 is."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


def options(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each contender runs")
    parser.add_argument(
        "--parts", nargs="*", choices=list(PAIRS), default=list(PAIRS), help="which parts of the table to make"
    )
    return parser.parse_args(words)


def main() -> None:
    asked = options(sys.argv[1:])
    torch.set_num_threads(1)
    cost = cost_of_bf16()
    narrow = "bfloat16" if cost <= 1 else "float32"
    print(
        f"{processor_name()}, {os.cpu_count()} cores, torch {torch.__version__}; a product in bf16 takes {cost:.2f} x"
    )
    print("the time of one in fp32" + ("" if cost <= 1 else ", so every contender called bf16 runs in fp32") + "\n")
    titles = [
        "femto",
        "tokens/s",
        "peer",
        "tokens/s",
        "femto : peer (each round)",
        "processor time",
        "peak MiB",
        "memory",
    ]
    print(f"| {' | '.join(titles)} |\n" + "|---" * len(titles) + "|")
    for name in asked.parts:
        print(*measure(name, asked.rounds, narrow), sep="\n", flush=True)
    if "fp32" in asked.parts:
        print(f"\nkernel overhead per step against a loop written by hand: {measure_overhead():.2%}")


if __name__ == "__main__":
    main()
