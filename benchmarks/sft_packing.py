"""Packing: femto-sft beside TRL's best-fit decreasing (where it is installed) and a quadratic first fit, same lengths.

    pip install --no-deps trl        # or: pip install --no-deps --target DIR trl, and PYTHONPATH=DIR
    python -m benchmarks.sft_packing

All are given the same lists of tokens (of a byte each, so that moving them weighs little) and put them into rows.
Processor time, the best of rounds taken in turn. TRL's function is called on a table, without the map around it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from femto_sft.packing import PACKINGS

CONVERSATIONS = 100_000
ROUNDS = 3
SHAPES = ("log-normal, rows of 2048", "uniform, rows of 2048", "log-normal, rows of 512")


@attrs.frozen
class Result:
    """What one way made of the lengths."""

    rows: int
    seconds: float


def lengths_of(shape: str) -> tuple[list[int], int]:
    """Return the lengths that `shape` names, and the capacity of a row."""
    kind, _, capacity = shape.partition(", rows of ")
    random = np.random.default_rng(0)
    most = int(capacity)
    if kind == "uniform":
        return random.integers(1, most + 1, CONVERSATIONS).tolist(), most
    drawn = random.lognormal(5.5, 0.9, CONVERSATIONS).astype(np.int64)
    return np.clip(drawn, 1, most).tolist(), most


def femto(packing: str, lengths: Sequence[int], capacity: int) -> Result:
    """Pack, and put the tokens into the order of the rows as TRL does."""
    tokens: npt.NDArray[np.int8] = np.zeros(sum(lengths), np.int8)
    started = time.process_time()
    rows = PACKINGS[packing](lengths, capacity)
    starts = np.cumsum([0, *lengths]).tolist()
    moved = np.concatenate([tokens[starts[item] : starts[item + 1]] for row in rows for item in row])
    seconds = time.process_time() - started
    assert len(moved) == len(tokens)
    return Result(len(rows), seconds)


def trl(lengths: Sequence[int], capacity: int) -> Result:
    """What `trl.pack_dataset` does with the strategy bfd, its default."""
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    starts = np.cumsum([0, *lengths])
    ids = pa.LargeListArray.from_arrays(starts, pa.array(np.zeros(int(starts[-1]), np.int8)))
    table = pa.table({"input_ids": ids})
    started = time.process_time()
    packed = _pack_bfd(table, capacity)
    return Result(len(packed), time.process_time() - started)


def quadratic(lengths: Sequence[int], capacity: int) -> Result:
    """First-fit decreasing by looking at every open row, on a twentieth of the conversations: it would take minutes."""
    some = sorted(lengths[: len(lengths) // 20], reverse=True)
    started = time.process_time()
    room: list[int] = []
    for length in some:
        at = next((i for i, left in enumerate(room) if left >= length), len(room))
        if at == len(room):
            room.append(capacity)
        room[at] -= length
    return Result(len(room), time.process_time() - started)


def main() -> None:
    ways: dict[str, Callable[[Sequence[int], int], Result]] = {
        "femto ffd": lambda lengths, capacity: femto("ffd", lengths, capacity),
        "femto bfd": lambda lengths, capacity: femto("bfd", lengths, capacity),
    }
    if importlib.util.find_spec("trl") is not None:
        ways["trl bfd"] = trl
    ways["quadratic, 1/20"] = quadratic
    print(f"{CONVERSATIONS:,} conversations, best of {ROUNDS} rounds\n")
    print("| lengths | way | rows | full | seconds |\n|---|---|---|---|---|")
    for shape in SHAPES:
        lengths, capacity = lengths_of(shape)
        results: dict[str, list[Result]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                results[way].append(run(lengths, capacity))
        for way, found in results.items():
            total = sum(lengths[: len(lengths) // 20] if way.startswith("quadratic") else lengths)
            full = total / (found[0].rows * capacity)
            print(f"| {shape} | {way} | {found[0].rows:,} | {full:.3%} | {min(r.seconds for r in found):.3f} |")


if __name__ == "__main__":
    main()
