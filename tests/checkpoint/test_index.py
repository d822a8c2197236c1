"""Any layout reads what any other wrote: random boxes are saved, and other random boxes are loaded."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from femto_checkpoint.files import write_safetensors
from femto_checkpoint.index import MASTER, Checkpoint, Index, intersect, write_index
from femto_checkpoint.snapshot import merge, merge_scalars, restore, take_snapshot
from femto_checkpoint.store import kept_fields
from femto_core.checkpoint import RunState
from femto_core.layout import Box, ParamLayout, boxes_of_range
from femto_core.mesh import Mesh
from femto_core.precision import ParamShare

AXES = ("tp", "dp", "cp")
Cut = list[tuple[int, int]]


@attrs.frozen
class FakeMesh:
    """A stand-in for a mesh: a layout asks for sizes and coordinates only."""

    sizes: dict[str, int]
    place: dict[str, int]

    def size(self, *axes: str) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def coordinate(self, *axes: str) -> int:
        number = 0
        for axis in axes:
            number = number * self.size(axis) + self.place.get(axis, 0)
        return number


@attrs.frozen
class Share:
    """One rank's share of one parameter."""

    layout: ParamLayout
    filling: int
    """Number of padding elements at the master's end."""
    flattened: bool


@attrs.frozen
class World:
    """Every rank's shares, of the same parameters in the same order."""

    sizes: dict[str, int]
    ranks: list[tuple[dict[str, int], list[Share]]]

    def mesh(self, place: dict[str, int]) -> Mesh:
        fake: Any = FakeMesh(self.sizes, place)
        return fake  # type: ignore[no-any-return]


@st.composite
def cuts(draw: st.DrawFn, length: int, parts: int) -> Cut:
    """Cut a range into `parts` ranges, of which some may be empty."""
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return list(zip([0, *edges], [*edges, length], strict=True))


@st.composite
def worlds(draw: st.DrawFn, shapes: Sequence[tuple[int, ...]]) -> World:
    """Cut every parameter by a dimension over tp, by a flat range over dp, and repeat it over cp; tie some."""
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    shares: dict[tuple[int, int, int], list[Share]] = {
        (t, d, c): [] for t in range(sizes["tp"]) for d in range(sizes["dp"]) for c in range(sizes["cp"])
    }
    for number, shape in enumerate(shapes):
        by_dimension = bool(shape) and draw(st.booleans())
        flat_range, tied = draw(st.booleans()), draw(st.booleans())
        dimension = draw(st.integers(0, len(shape) - 1)) if by_dimension else 0
        ranges = draw(cuts(shape[dimension], sizes["tp"])) if by_dimension else []
        flat: dict[int, Cut] = {}
        filling = draw(st.integers(0, 3))
        for (t, d, c), mine in shares.items():
            offsets, extent = [0] * len(shape), list(shape)
            if by_dimension:
                offsets[dimension], extent[dimension] = ranges[t][0], ranges[t][1] - ranges[t][0]
            box = Box(tuple(offsets), tuple(extent))
            if t not in flat:
                flat[t] = draw(cuts(box.numel, sizes["dp"]))
            layout = ParamLayout(
                name=f"parameter.{number}",
                global_shape=shape,
                box=box,
                flat=flat[t][d] if flat_range else (0, box.numel),
                replicated=frozenset({"cp"} | (set() if by_dimension else {"tp"}) | (set() if flat_range else {"dp"})),
            )
            mine.append(Share(layout, filling, flat_range or filling > 0))
            if tied and c == 0:  # a copy elsewhere: kept equal, not saved
                mine.append(Share(attrs.evolve(layout, primary=False, tied=layout.name), 0, True))
    ranks = [(dict(zip(AXES, key, strict=True)), mine) for key, mine in shares.items()]
    return World(sizes, ranks)


def state_of(shares: Sequence[Share], optimizer: torch.optim.Optimizer, masters: list[nn.Parameter]) -> RunState:
    nothing: Any = None
    return RunState(
        shares=[
            ParamShare(name=f"{n}", compute=master, master=master, layout=share.layout)
            for n, (share, master) in enumerate(zip(shares, masters, strict=True))
        ],
        optimizer=optimizer,
        parts={},
        rank_parts={},
        identity={},
        plugins={},
        config={},
        model_config=nothing,
        tokenizer_path=Path("none"),
    )


def owned_values(whole: torch.Tensor, share: Share) -> torch.Tensor:
    parts = [whole[box.slices()].reshape(-1) for box in share.layout.owned()]
    return torch.cat([*parts, torch.full((share.filling,), 77).to(whole.dtype)])


def shaped(flat: torch.Tensor, share: Share) -> torch.Tensor:
    return flat if share.flattened else flat.view(share.layout.box.sizes)


def build(shares: Sequence[Share], wholes: dict[str, torch.Tensor] | None, dtype: torch.dtype) -> RunState:
    """Make a rank's state from global tensors; without them, of zeros, with an empty optimizer."""
    zeros = {share.layout.name: torch.zeros(share.layout.global_shape, dtype=dtype) for share in shares}
    masters = [
        nn.Parameter(shaped(owned_values((wholes or zeros)[share.layout.name], share), share)) for share in shares
    ]
    optimizer = torch.optim.AdamW(masters, lr=0.1)
    state = state_of(shares, optimizer, masters)
    for group, share in zip(state.shares, shares, strict=True):
        if wholes is not None and group.trainable:
            whole = wholes[share.layout.name]
            optimizer.state[group.master] = {
                "step": torch.tensor(3.0),
                "exp_avg": shaped(owned_values(whole * 2, share), share),
                "exp_avg_sq": shaped(owned_values((whole * 3).bfloat16(), share), share),
                "plain": 0.1 + 1e-12,
            }
    return state


def write(folder: Path, world: World, wholes: dict[str, torch.Tensor], dtype: torch.dtype) -> Checkpoint:
    snapshots, files = [], {}
    for number, (place, shares) in enumerate(world.ranks):
        name = f"rank-{number:05}.safetensors"
        snapshot = take_snapshot(build(shares, wholes, dtype), world.mesh(place), name, copy=True)
        shapes = {key: tuple(value.shape) for key, value in snapshot.tensors.items()}
        dtypes = {key: value.dtype for key, value in snapshot.tensors.items()}
        files[name] = write_safetensors(folder / name, shapes, dtypes, snapshot.tensors.__getitem__, {})
        snapshots.append(snapshot)
    index = Index(
        step=1,
        layout="none",
        identity={},
        model={},
        plugins={},
        config={},
        tensors=merge([snapshot.index for snapshot in snapshots]),
        scalars=merge_scalars([snapshot.scalars for snapshot in snapshots]),
        files=files,
    )
    write_index(folder, index)
    return Checkpoint(folder)


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), shapes=SHAPES, dtype=DTYPES)
def test_what_one_layout_wrote_any_other_reads(
    data: st.DataObject, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    writers, readers = data.draw(worlds(shapes)), data.draw(worlds(shapes))
    generator = torch.Generator().manual_seed(0)
    wholes = {f"parameter.{n}": torch.randn(s, generator=generator).to(dtype) for n, s in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write(Path(folder), writers, wholes, dtype)
        checkpoint.verify(checkpoint.index.files)
        assert checkpoint.parameters == sorted(wholes)
        for name, whole in wholes.items():
            assert torch.equal(checkpoint.read(f"{MASTER}/{name}", checkpoint.whole(f"{MASTER}/{name}")), whole)
        for _, shares in readers.ranks:
            state = build(shares, None, dtype)
            restore(state, checkpoint.read, kept_fields(checkpoint), checkpoint.index.scalars)
            for group, share in zip(state.shares, shares, strict=True):
                whole, count = wholes[group.layout.name], sum(box.numel for box in share.layout.owned())
                assert torch.equal(group.master.flatten()[:count], owned_values(whole, share)[:count])
                if not group.trainable or not group.master.numel():
                    assert group.master not in state.optimizer.state, "an empty share has no optimizer state"
                    continue
                kept = state.optimizer.state[group.master]
                assert kept["exp_avg"].shape == kept["exp_avg_sq"].shape == group.master.shape
                assert torch.equal(kept["exp_avg"].flatten()[:count], owned_values(whole * 2, share)[:count])
                squares = kept["exp_avg_sq"]
                assert squares.dtype == torch.bfloat16, "the optimizer's own dtypes are kept"
                assert torch.equal(squares.flatten()[:count], owned_values((whole * 3).bfloat16(), share)[:count])
                assert not kept["exp_avg"].flatten()[count:].any(), "filling holds nothing"
                assert float(kept["step"]) == 3.0
                assert kept["plain"] == 0.1 + 1e-12


def test_replicas_share_the_writing_out_and_write_nothing_twice() -> None:
    world = World({"dp": 3}, [])
    shares = [Share(ParamLayout.whole(f"p{n}", (4,), ("dp",)), 0, False) for n in range(60)]
    wholes = {f"p{n}": torch.ones(4) for n in range(60)}
    names = [
        set(take_snapshot(build(shares, wholes, torch.float32), world.mesh({"dp": d}), "f", copy=True).index)
        for d in range(3)
    ]
    assert all(30 < len(found) < 90 for found in names), "about 20 parameters each: a weight and two states"
    assert sum(len(found) for found in names) == len(set.union(*names)) == 180


def test_frozen_parameters_have_no_optimizer_state_and_need_none() -> None:
    shares = [Share(ParamLayout.whole("frozen", (3,), ()), 0, False), Share(ParamLayout.whole("b", (2,), ()), 0, False)]
    wholes = {"frozen": torch.ones(3), "b": torch.ones(2)}

    def freeze(state: RunState) -> RunState:
        state.shares[0].master.requires_grad_(False)
        state.optimizer.state.pop(state.shares[0].master, None)
        return state

    mesh = World({}, []).mesh({})
    snapshot = take_snapshot(freeze(build(shares, wholes, torch.float32)), mesh, "f", copy=True)
    assert set(snapshot.index) == {f"{MASTER}/frozen", f"{MASTER}/b", "exp_avg/b", "exp_avg_sq/b"}
    boxed = {key.rpartition("#")[0]: value for key, value in snapshot.tensors.items()}
    for thaw in (False, True):  # a parameter that was frozen begins without optimizer state
        state = build(shares, None, torch.float32)
        state = state if thaw else freeze(state)
        fields = {"b": {"exp_avg", "exp_avg_sq", "step"}}
        restore(state, lambda name, box: boxed[name][box.slices()], fields, snapshot.scalars)
        assert torch.equal(state.shares[0].master, torch.ones(3))
        assert state.shares[0].master not in state.optimizer.state
        assert state.shares[1].master in state.optimizer.state


def test_a_layout_that_leaves_a_gap_is_found_before_anything_is_committed() -> None:
    layout = attrs.evolve(ParamLayout.whole("w", (4,), ()), flat=(0, 3))
    share = Share(layout, 0, True)
    mesh = World({}, []).mesh({})
    snapshot = take_snapshot(build([share], {"w": torch.ones(4)}, torch.float32), mesh, "f", copy=True)
    with pytest.raises(ValueError, match="do not add up to its shape: 3 values of 4"):
        merge([snapshot.index])
    with pytest.raises(ValueError, match="6 values of 4"):
        merge([snapshot.index, snapshot.index])


def test_ranks_that_disagree_are_found_before_anything_is_committed() -> None:
    share = Share(ParamLayout.whole("w", (4,), ()), 0, False)
    mesh = World({}, []).mesh({})
    one = take_snapshot(build([share], {"w": torch.ones(4)}, torch.float32), mesh, "f", copy=True)
    other = take_snapshot(build([share], {"w": torch.ones(4).double()}, torch.float64), mesh, "f", copy=True)
    with pytest.raises(ValueError, match="ranks disagree on master/w"):
        merge([one.index, other.index])
    changed = {"step/w": attrs.evolve(one.scalars["step/w"], value=4.0)}
    with pytest.raises(ValueError, match="ranks disagree on step/w"):
        merge_scalars([one.scalars, changed])


def test_what_an_optimizer_keeps_that_is_no_part_of_a_parameter_is_refused_at_the_first_save() -> None:
    share = Share(ParamLayout.whole("w", (4, 2), ()), 0, False)
    state = build([share], {"w": torch.ones(4, 2)}, torch.float32)
    state.optimizer.state[state.shares[0].master]["row_factors"] = torch.ones(4)
    with pytest.raises(TypeError, match=r"keeps row_factors of shape \(4,\) for w"):
        take_snapshot(state, World({}, []).mesh({}), "f", copy=True)


def test_strides_of_a_turned_parameter_are_its_optimizer_states_too() -> None:
    turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())  # [3, 2], not contiguous
    optimizer = torch.optim.AdamW([turned], lr=0.1, fused=True)
    layout = ParamLayout.whole("w", (3, 2), ())
    state = attrs.evolve(state_of([Share(layout, 0, False)], optimizer, [turned]))
    turned.grad = torch.ones_like(turned)
    optimizer.step()
    snapshot = take_snapshot(state, World({}, []).mesh({}), "f", copy=True)
    boxed = {key.rpartition("#")[0]: value for key, value in snapshot.tensors.items()}
    before = optimizer.state[turned]["exp_avg"].clone()
    restore(
        state, lambda name, box: boxed[name][box.slices()], {"w": {"exp_avg", "exp_avg_sq", "step"}}, snapshot.scalars
    )
    assert torch.equal(optimizer.state[turned]["exp_avg"], before)
    assert optimizer.state[turned]["exp_avg"].stride() == turned.stride()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=3))
def test_what_two_boxes_share_is_what_both_contain(dimensions: list[tuple[int, int, int, int]]) -> None:
    a = Box(tuple(d[0] for d in dimensions), tuple(d[1] for d in dimensions))
    b = Box(tuple(d[2] for d in dimensions), tuple(d[3] for d in dimensions))
    space = torch.zeros((9,) * len(dimensions), dtype=torch.int64)
    space[a.slices()] += 1
    space[b.slices()] += 1
    common = intersect(a, b)
    assert (common.numel if common else 0) == int((space == 2).sum())
    if common:
        assert bool((space[common.slices()] == 2).all())


def test_boxes_of_a_range_are_few_and_in_its_order() -> None:
    tensor = torch.arange(2 * 3 * 4).view(2, 3, 4)
    boxes = boxes_of_range((2, 3, 4), 3, 22)
    assert torch.equal(torch.cat([tensor[b.slices()].flatten() for b in boxes]), torch.arange(3, 22))
    assert len(boxes) <= 5
