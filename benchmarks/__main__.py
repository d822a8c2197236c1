"""`make bench`: every contender in turn, round after round, and the ratios within this one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from typing import Any

import torch

from benchmarks.overhead import measure_overhead

ROUNDS = 3
PAIRS = (("femto", 2), ("ddp", 2), ("ddp-fused", 2), ("femto", 1))


def run(contender: str, processes: int) -> dict[str, Any]:
    """Run one contender in processes of its own, one thread each; return what it measured."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launcher, "-m", "benchmarks.contender", contender],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def speed_ratios(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    """Return the ratio of tokens per second in each round: what ran close together is compared."""
    return [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each contender runs")
    rounds: int = parser.parse_args().rounds
    results: dict[tuple[str, int], list[dict[str, Any]]] = {pair: [] for pair in PAIRS}
    for _ in range(rounds):
        for pair in PAIRS:
            results[pair].append(run(*pair))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    print("| contender | ranks | tokens/s | step ms | peak MiB |\n|---|---|---|---|---|")
    middle: dict[tuple[str, int], dict[str, float]] = {}
    for (name, ranks), runs in results.items():
        values = {key: statistics.median(r[key] for r in runs) for key in ("tokens_per_s", "step_ms", "peak_mib")}
        middle[name, ranks] = values
        print(
            f"| {name} | {ranks} | {values['tokens_per_s']:.0f} | {values['step_ms']:.0f} | {values['peak_mib']:.0f} |"
        )
    print("\n| femto on 2 ranks against | tokens/s | of which in each round | peak memory |\n|---|---|---|---|")
    for other in (("ddp", 2), ("ddp-fused", 2)):
        ratios = [
            a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(results["femto", 2], results[other], strict=True)
        ]
        memory = middle["femto", 2]["peak_mib"] / middle[other]["peak_mib"]
        each = ", ".join(f"{r:.3f}" for r in ratios)
        print(f"| {other[0]} on {other[1]} | {statistics.median(ratios):.3f} x | {each} | {memory:.3f} x |")
    scaling = [
        a["tokens_per_s"] / b["tokens_per_s"] / 2 for a, b in zip(results["femto", 2], results["femto", 1], strict=True)
    ]
    each = ", ".join(f"{r:.3f}" for r in scaling)
    print(f"| twice itself on 1 | {statistics.median(scaling):.3f} x | {each} | |")
    overhead = measure_overhead()
    print(f"\nkernel overhead per step against a loop written by hand: {overhead:.2%}")


if __name__ == "__main__":
    main()
