"""Packing: femto-sft beside TRL's best-fit decreasing (where it is installed) and a quadratic first fit, same lengths.

    pip install --no-deps trl        # or: pip install --no-deps --target DIR trl, and PYTHONPATH=DIR
    python -m benchmarks.sft_packing

femto and TRL are given the same tokens (of a byte each, so that moving them weighs little) and where each conversation
begins. Timed is the same for both: leave out empty ones, cut long ones to a row, pack, and put the tokens and lengths
into the order of the rows. (No length needs cutting here. TRL's cut copies all tokens all the same; femto's is a
minimum of two numbers. "TRL's cut" is how long TRL takes until it begins to pack, which its time includes.)
Processor time, the best of rounds taken in turn. TRL's function is called on a table, without the map around it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import time
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from femto_sft.packing import PACKINGS

CONVERSATIONS = 100_000
ROUNDS = 3
SHAPES = ("log-normal, rows of 2048", "uniform, rows of 2048", "log-normal, rows of 512")


@attrs.frozen
class Result:
    """The rows that one way of packing made, and its processor time."""

    rows: int
    """0 for a way that only prepares."""
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


def femto(packing: str, starts: npt.NDArray[np.int64], capacity: int) -> Result:
    """Cut, pack and move conversations as TRL does; `starts` has where each begins, and the end."""
    tokens: npt.NDArray[np.int8] = np.zeros(starts[-1], np.int8)
    started = time.process_time()
    lengths = np.minimum(np.diff(starts), capacity)
    kept = np.flatnonzero(lengths)
    begins, lengths = starts[kept], lengths[kept]
    rows = PACKINGS[packing](lengths.tolist(), capacity)
    order = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
    in_order = lengths[order]
    begin = begins[order]
    places = zip(begin.tolist(), (begin + in_order).tolist(), strict=True)
    moved = np.concatenate([tokens[start:stop] for start, stop in places])
    seconds = time.process_time() - started
    assert len(moved) == in_order.sum()
    return Result(len(rows), seconds)


def table_of(starts: npt.NDArray[np.int64]) -> pa.Table:
    return pa.table({"input_ids": pa.LargeListArray.from_arrays(starts, pa.array(np.zeros(starts[-1], np.int8)))})


def trl(starts: npt.NDArray[np.int64], capacity: int) -> Result:
    """What `trl.pack_dataset` does with the strategy bfd, its default."""
    from trl.data_utils import _pack_bfd

    table = table_of(starts)
    started = time.process_time()
    packed = _pack_bfd(table, capacity)
    return Result(len(packed), time.process_time() - started)


def trl_cut(starts: npt.NDArray[np.int64], capacity: int) -> Result:
    """The first lines of that function: empty lists left out, the others cut."""
    table = table_of(starts)
    started = time.process_time()
    [column] = [column.chunks[0] for column in table.combine_chunks().columns]
    column = pc.filter(column, pc.greater(pc.list_value_length(column), 0))
    pc.list_value_length(pc.list_slice(column, 0, capacity))
    return Result(0, time.process_time() - started)


def quadratic(starts: npt.NDArray[np.int64], capacity: int) -> Result:
    """First-fit decreasing by looking at every open row, on a twentieth of the conversations: it would take minutes."""
    some = sorted(np.diff(starts)[: len(starts) // 20].tolist(), reverse=True)
    started = time.process_time()
    room: list[int] = []
    for length in some:
        at = next((i for i, left in enumerate(room) if left >= length), len(room))
        if at == len(room):
            room.append(capacity)
        room[at] -= length
    return Result(len(room), time.process_time() - started)


def main() -> None:
    ways: dict[str, Callable[[npt.NDArray[np.int64], int], Result]] = {
        "femto ffd": functools.partial(femto, "ffd"),
        "femto bfd": functools.partial(femto, "bfd"),
    }
    if importlib.util.find_spec("trl") is not None:
        ways |= {"TRL bfd": trl, "TRL's cut": trl_cut}
    ways["quadratic, 1/20"] = quadratic
    print(f"{CONVERSATIONS:,} conversations, best of {ROUNDS} rounds\n")
    print("| lengths | way | rows | full | seconds |\n|---|---|---|---|---|")
    for shape in SHAPES:
        lengths, capacity = lengths_of(shape)
        starts = np.cumsum([0, *lengths])
        results: dict[str, list[Result]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                results[way].append(run(starts, capacity))
        for way, found in results.items():
            seconds = min(result.seconds for result in found)
            if not found[0].rows:
                print(f"| {shape} | {way} | | | {seconds:.3f} |")
                continue
            total = sum(lengths[: len(lengths) // 20] if way.startswith("quadratic") else lengths)
            full = total / (found[0].rows * capacity)
            print(f"| {shape} | {way} | {found[0].rows:,} | {full:.3%} | {seconds:.3f} |")


if __name__ == "__main__":
    main()
