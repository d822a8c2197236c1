"""`make bench`: every contender in turn, round after round, and the ratios within this one run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from typing import Any

import attrs
import torch

from benchmarks.overhead import measure_overhead
from benchmarks.workload import Workload

ROUNDS = 3


@attrs.frozen
class Entry:
    """One line of a table: who runs, on how many ranks, with how many rows a step."""

    contender: str
    ranks: int = 2
    batch: int = Workload().batch

    def __str__(self) -> str:
        return f"{self.contender} on {self.ranks}" + (f", {self.batch} rows" if self.batch != Workload().batch else "")

    @property
    def runs_here(self) -> bool:
        """Whether what it needs is installed."""
        return not self.contender.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


PLAIN, ZERO1, ZERO2, ZERO3 = (Entry(f"femto{plugins}") for plugins in ("", "+bf16+zero1", "+bf16+zero2", "+bf16+zero3"))
PAIRS = {
    "fp32": [(PLAIN, Entry("ddp")), (PLAIN, Entry("ddp-fused"))],
    "zero": [
        (Entry("femto+bf16"), Entry("ddp-bf16")),
        (ZERO1, Entry("deepspeed-1")),
        (ZERO2, Entry("deepspeed-2")),
        (ZERO3, Entry("fsdp2")),
        (ZERO3, Entry("deepspeed-3")),
    ],
    "model parallel": [
        (Entry("femto+bf16+tp"), Entry("dtensor-tp")),
        (Entry("femto+bf16+tp+tp.sequence_parallel=true"), Entry("dtensor-tp")),
        (Entry("femto+bf16+pp"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.layers=balanced"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.schedule=gpipe"), Entry("torch-gpipe")),
        (Entry("femto+bf16+pp+pp.schedule=zb"), Entry("torch-1f1b")),
        (Entry("femto+bf16+pp+pp.schedule=zb+pp.layers=balanced"), Entry("torch-1f1b")),
    ],
    "checkpointing": [(Entry("femto+bf16+sac"), Entry("ddp-bf16-checkpoint"))],
}
"""Tables by name: femto, and the peer it is measured against."""
SCALING = {"fp32": [Entry("femto", ranks=1), Entry("femto", ranks=1, batch=Workload().batch // 2)]}
"""What two ranks are compared with twice of: the same step on one rank, and one rank's share of it alone."""


def run(entry: Entry) -> dict[str, Any]:
    """Run one contender in processes of its own, one thread each; return what it measured."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entry.ranks)]
    done = subprocess.run(
        [*launcher, "-m", "benchmarks.contender", entry.contender, str(entry.batch)],
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


def table(name: str, rounds: int) -> None:
    """Run one table's contenders `rounds` times in turn; print medians, and ratios within each round."""
    pairs = [pair for pair in PAIRS[name] if pair[1].runs_here]
    entries = list(dict.fromkeys(entry for pair in pairs for entry in pair)) + SCALING.get(name, [])
    results: dict[Entry, list[dict[str, Any]]] = {entry: [] for entry in entries}
    for _ in range(rounds):
        for entry in entries:
            results[entry].append(run(entry))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("| contender | tokens/s | step ms | peak MiB |\n|---|---|---|---|")
    for entry, runs in results.items():
        speed, step, peak = (statistics.median(r[key] for r in runs) for key in ("tokens_per_s", "step_ms", "peak_mib"))
        print(f"| {entry} | {speed:.0f} | {step:.0f} | {peak:.0f} |")
    print("\n| femto against | tokens/s | in each round | peak memory |\n|---|---|---|---|")
    for ours, theirs in pairs:
        memory = statistics.median(r["peak_mib"] for r in results[ours]) / statistics.median(
            r["peak_mib"] for r in results[theirs]
        )
        print_ratios(
            f"{ours.contender} against {theirs.contender}", results[ours], results[theirs], 1, f"{memory:.2f} x"
        )
    for alone in SCALING.get(name, []):
        print_ratios(f"femto on 2 against twice {alone}", results[PLAIN], results[alone], 2, "")
    print()


def print_ratios(what: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], times: int, memory: str) -> None:
    """Print the ratio of tokens per second, round by round: what ran close together is compared."""
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] / times for a, b in zip(ours, theirs, strict=True)]
    print(f"| {what} | {statistics.median(ratios):.3f} x | {', '.join(f'{r:.3f}' for r in ratios)} | {memory} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each contender runs")
    parser.add_argument("--tables", nargs="*", choices=list(PAIRS), default=list(PAIRS), help="which tables to make")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    for name in options.tables:
        table(name, options.rounds)
    if "fp32" in options.tables:
        print(f"kernel overhead per step against a loop written by hand: {measure_overhead():.2%}")


if __name__ == "__main__":
    main()
