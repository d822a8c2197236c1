"""Bin packing of conversations into rows: first-fit and best-fit decreasing, in n log n.

First-fit decreasing never takes more than 11/9 of the fewest rows plus 6/9 (Dosa 2007), best-fit decreasing never more
than 11/9 plus 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Rows = list[list[int]]
"""For each row the indices of its items, in the order in which they were packed."""


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Rows:
    """Put each item, the longest first, into the first row with room for it.

    `lengths` are in [1, capacity]; items of equal length keep their order. A segment tree over the rows has the largest
    room of each range, so one descent finds the row. Items of equal length are packed into it together, with the same
    result as one by one.
    """
    # No two neighbouring rows fit into one, so there are at most twice as many rows as if all were full.
    most = min(len(lengths), 2 * sum(lengths) // capacity + 1)
    leaves = 1 << max(0, most - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[i] = max(room[2 * i], room[2 * i + 1]); the rows are the leaves
    rows: Rows = [[] for _ in range(most)]
    for length, items in _by_length(lengths, capacity):
        start = 0
        while start < len(items):
            node = 1
            while node < leaves:
                node *= 2
                node += room[node] < length
            left = room[node]
            stop = min(len(items), start + left // length)
            rows[node - leaves] += items[start:stop]
            left -= (stop - start) * length
            start, room[node] = stop, left
            while node > 1:
                other = room[node ^ 1]
                node //= 2
                left = max(left, other)
                if room[node] == left:
                    break
                room[node] = left
    return [row for row in rows if row]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Rows:
    """Put each item, the longest first, into the fullest row with room for it.

    Bit r of one large integer says whether there is a row with room r, so the least sufficient room is its lowest bit
    from the item's length on.
    """
    rows: Rows = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # row numbers by remaining room
    there = 0
    for length, items in _by_length(lengths, capacity):
        start = 0
        while start < len(items):
            fitting = there >> length
            if fitting:
                left = length + (fitting & -fitting).bit_length() - 1
                number = open_rows[left].pop()
                if not open_rows[left]:
                    there ^= 1 << left
            else:
                left, number = capacity, len(rows)
                rows.append([])
            stop = min(len(items), start + left // length)
            rows[number] += items[start:stop]
            left -= (stop - start) * length
            start = stop
            if left:
                open_rows[left].append(number)
                there |= 1 << left
    return rows


def one_each(lengths: Sequence[int], capacity: int) -> Rows:
    """Put every item into a row of its own."""
    return [[item] for item in range(len(lengths))]


PACKINGS: dict[str, Callable[[Sequence[int], int], Rows]] = {
    "ffd": first_fit_decreasing,
    "bfd": best_fit_decreasing,
    "pad": one_each,
}


def _by_length(lengths: Sequence[int], capacity: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each length, the longest first, with the indices of the items of that length."""
    sizes: npt.NDArray[np.int64] = np.asarray(lengths, np.int64)
    if not len(sizes):
        return
    if not 1 <= int(sizes.min()) <= int(sizes.max()) <= capacity:
        raise ValueError(f"lengths {sizes.min()} to {sizes.max()} do not lie between 1 and {capacity}")
    order = np.argsort(-sizes, kind="stable")
    different = np.flatnonzero(np.diff(sizes[order])) + 1
    for group in np.split(order, different):
        yield int(sizes[group[0]]), group.tolist()
