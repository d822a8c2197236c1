"""Layouts: a flat range and its boxes are the same elements, in the same order, each once."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from femto_core.layout import Box, ParamLayout, boxes_of_range
from femto_core.mesh import Mesh
from tests.conftest import read_flat

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    sizes = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(sizes))] * 2)))
    return sizes, start, stop


def elements(box: Box, sizes: tuple[int, ...]) -> list[int]:
    """Flat numbers of a box's elements, in the order in which its flattened values lie."""
    numbers = torch.arange(math.prod(sizes)).view(sizes)
    return cast("list[int]", numbers[box.slices()].flatten().tolist())


@given(ranges())
@settings(max_examples=400, deadline=None)
def test_boxes_cover_exactly_the_range_in_its_order(case: tuple[tuple[int, ...], int, int]) -> None:
    sizes, start, stop = case
    boxes = boxes_of_range(sizes, start, stop)
    covered = [number for box in boxes for number in elements(box, sizes)]
    assert covered == list(range(start, stop))
    assert all(box.numel == len(elements(box, sizes)) > 0 for box in boxes)
    assert all(len(box.offsets) == len(box.sizes) == len(sizes) for box in boxes)
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)


def fewest(sizes: tuple[int, ...], start: int, stop: int) -> int:
    """Fewest boxes by trying all ways to cut the range, a box being a run whose bounding box has no other element."""
    places = list(itertools.product(*(range(size) for size in sizes)))

    def is_box(a: int, b: int) -> bool:
        spans = [len(set(along)) for along in zip(*places[a:b], strict=True)]
        return math.prod(spans) == b - a

    best = {start: 0}
    for end in range(start + 1, stop + 1):
        best[end] = 1 + min(best[begin] for begin in range(start, end) if is_box(begin, end))
    return best[stop]


@given(ranges())
@settings(max_examples=60, deadline=None)
def test_no_other_way_needs_fewer_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    sizes, start, stop = case
    stop = min(stop, start + 24)
    assert len(boxes_of_range(sizes, start, stop)) == fewest(sizes, start, stop)


def test_the_worst_ranges_need_as_many_boxes_as_promised() -> None:
    assert len(boxes_of_range((3, 3), 1, 8)) == 3
    assert len(boxes_of_range((3, 3, 3), 1, 26)) == 5
    assert len(boxes_of_range((3, 3, 3, 3), 1, 80)) == 7


@pytest.mark.parametrize("sizes", [(0,), (4, 0), (0, 4)])
def test_a_parameter_without_elements_has_no_boxes(sizes: tuple[int, ...]) -> None:
    layout = ParamLayout.whole("empty", sizes, ())
    assert layout.flat == (0, 0)
    assert layout.owned() == []
    assert read_flat(torch.empty(sizes), layout).shape == (0,)


def test_a_scalar_is_one_box() -> None:
    layout = ParamLayout.whole("scalar", (), ())
    assert layout.owned() == [Box((), ())]
    assert read_flat(torch.tensor(7.0), layout).tolist() == [7.0]


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, list[int]]:
    """A global shape, a box in it, and cuts of the box's flat range: what tensor parallelism and ZeRO do together."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    box = Box(offsets, sizes)
    cuts = sorted(draw(st.lists(st.integers(0, box.numel), max_size=4)))
    return shape, box, [0, *cuts, box.numel]


@given(placed())
@settings(max_examples=300, deadline=None)
def test_shares_of_a_box_read_and_written_back_give_the_box(case: tuple[tuple[int, ...], Box, list[int]]) -> None:
    shape, box, cuts = case
    whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    written = torch.full(shape, -1.0, dtype=torch.float64)
    read = []
    for start, stop in itertools.pairwise(cuts):
        layout = ParamLayout(name="w", global_shape=shape, box=box, flat=(start, stop))
        share = read_flat(whole, layout)
        read.append(share)
        place = 0
        for owned in layout.owned():
            assert (written[owned.slices()] == -1).all(), "an element is owned twice"
            written[owned.slices()] = share[place : place + owned.numel].view(owned.sizes)
            place += owned.numel
        assert place == stop - start
    assert torch.equal(torch.cat(read), whole[box.slices()].flatten())
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[box.slices()] = True
    assert torch.equal(written[inside], whole[inside])
    assert (written[~inside] == -1).all()


@attrs.frozen
class Place:
    """A rank's coordinates on axes of two ranks each, which is all of a mesh that a layout asks for."""

    coordinates: dict[str, int]

    def coordinate(self, *axes: str) -> int:
        number = 0
        for axis in axes:
            number = number * self.size(axis) + self.coordinates.get(axis, 0)
        return number

    def size(self, *axes: str) -> int:
        return math.prod(2 if axis in self.coordinates else 1 for axis in axes)


def on_each_rank() -> list[tuple[tuple[int, ...], Mesh]]:
    ranks = itertools.product(range(2), range(2), range(2))
    return [(r, cast("Mesh", Place(dict(zip(("pp", "dp", "tp"), r, strict=True))))) for r in ranks]


def speakers(layout: ParamLayout) -> list[tuple[int, ...]]:
    """Ranks of a 2 x 2 x 2 mesh that speak for the layout's part."""
    return [rank for rank, place in on_each_rank() if layout.counts_on(place)]


def test_one_rank_of_all_replicas_speaks_for_a_part() -> None:
    def replicated(*axes: str, **more: Any) -> ParamLayout:
        return attrs.evolve(ParamLayout.whole("w", (4,), axes), **more)

    assert speakers(replicated("pp", "dp", "tp")) == [(0, 0, 0)]
    assert speakers(replicated("dp", "tp")) == [(0, 0, 0), (1, 0, 0)]  # each stage for its own
    assert speakers(replicated("dp")) == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert len(speakers(replicated())) == 8
    assert speakers(replicated("an axis that nobody added")) == speakers(replicated())
    assert speakers(replicated("dp", "tp", tied="embedding", primary=False)) == []


def test_replicas_are_numbered_from_the_rank_that_counts_whatever_the_order_of_their_axes() -> None:
    for axes in itertools.permutations(("pp", "dp", "tp", "an axis that nobody added"), 3):
        layout = ParamLayout.whole("w", (4,), axes)
        found = [(layout.replica(place), layout.counts_on(place)) for _, place in on_each_rank()]
        count = 8 if "an axis that nobody added" not in axes else 4
        assert {number for (number, _), _ in found} == set(range(count))
        assert {many for (_, many), _ in found} == {count}
        assert all((number == 0) == counts for (number, _), counts in found)


def test_a_gradient_is_summed_over_the_partial_axes_that_have_more_than_one_rank() -> None:
    layout = ParamLayout.whole("w", (4,), ("dp", "tp"), ("tp", "an axis that nobody added", "dp"))
    [(_, mesh), *_] = on_each_rank()
    assert layout.sums_over(mesh) == ("dp", "tp")
    assert ParamLayout.whole("w", (4,), ("dp",)).sums_over(mesh) == ()
