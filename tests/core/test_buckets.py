"""Flat layouts, buckets, the collector: every element in one place, every gradient once, every bucket in its turn."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import backward

from femto_core.buckets import ALIGNMENT, Bucket, FlatLayout, GradientCollector

SIZES = st.lists(st.integers(0, 100), max_size=12)
SHARES = st.integers(1, 9)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

# FlatLayout.


@given(SIZES, SHARES)
@settings(deadline=None)
def test_every_element_of_every_tensor_is_owned_by_exactly_one_share(sizes: list[int], shares: int) -> None:
    flat_layout = FlatLayout(tuple(sizes), shares)
    owned = [flat_layout.owned(share) for share in range(shares)]
    for number, size in enumerate(sizes):
        counts = [0] * size
        for ranges in owned:
            first, last = ranges[number]
            assert 0 <= first <= last <= size
            for element in range(first, last):
                counts[element] += 1
        assert counts == [1] * size


@given(SIZES, SHARES)
@settings(deadline=None)
def test_a_share_holds_just_the_elements_that_it_owns(sizes: list[int], shares: int) -> None:
    flat_layout = FlatLayout(tuple(sizes), shares)
    vector = torch.arange(flat_layout.numel)
    tensors = flat_layout.cut(vector)
    assert [t.numel() for t in tensors] == sizes
    length = flat_layout.share_numel
    for share in range(shares):
        part = vector[share * length : (share + 1) * length]
        for tensor, (first, last), mine in zip(
            tensors, flat_layout.owned(share), flat_layout.cut_share(part, share), strict=True
        ):
            assert torch.equal(mine, tensor[first:last])


@given(SIZES, SHARES)
@settings(deadline=None)
def test_shares_are_equal_aligned_and_hardly_longer_than_the_tensors(sizes: list[int], shares: int) -> None:
    flat_layout = FlatLayout(tuple(sizes), shares)
    assert flat_layout.numel == shares * flat_layout.share_numel
    assert flat_layout.share_numel % ALIGNMENT == 0
    assert all(start % ALIGNMENT == 0 for start in flat_layout.starts)
    places = zip(flat_layout.starts, sizes, strict=True)
    ends = [0, *(start + size for start, size in places)]
    assert all(end <= start for end, start in zip(ends, flat_layout.starts, strict=False)), "no two tensors overlap"
    assert ends[-1] <= flat_layout.numel
    assert flat_layout.numel < sum(sizes) + ALIGNMENT * (len(sizes) + shares)


@given(SIZES, SHARES)
@settings(deadline=None)
def test_what_is_cut_are_views_and_what_is_written_to_them_stays_apart(sizes: list[int], shares: int) -> None:
    flat_layout = FlatLayout(tuple(sizes), shares)
    vector = torch.full((flat_layout.numel,), -1.0)
    for number, tensor in enumerate(flat_layout.cut(vector)):
        tensor.fill_(number)
    for number, tensor in enumerate(flat_layout.cut(vector)):
        assert bool((tensor == number).all())
    assert int((vector == -1).sum()) == flat_layout.numel - sum(sizes)


@pytest.mark.parametrize(
    ("sizes", "shares", "owners"),
    [
        ((8, 0, 24), 2, [[(0, 8), (0, 0), (0, 16)], [(0, 0), (0, 0), (16, 24)]]),
        ((1,), 2, [[(0, 1)], [(0, 0)]]),
        ((6,), 4, [[(0, 6)], [(0, 0)], [(0, 0)], [(0, 0)]]),
        ((0,), 3, [[(0, 0)]] * 3),
        ((), 3, [[]] * 3),
        ((40,), 2, [[(0, 32)], [(32, 40)]]),
    ],
    ids=str,
)
def test_cases_that_broke_others(sizes: tuple[int, ...], shares: int, owners: list[Any]) -> None:
    flat_layout = FlatLayout(sizes, shares)
    assert [flat_layout.owned(share) for share in range(shares)] == owners


# Bucket.


def parameters(dtype: torch.dtype = F64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 5), (), (0, 4), (1,), (7,))]


def make_bucket(members: list[nn.Parameter], dtype: torch.dtype = F64, wire: torch.dtype = F64) -> Bucket:
    return Bucket(members, dtype=dtype, wire_dtype=wire, group=None)


def set_grad(parameter: nn.Parameter, value: float) -> None:
    parameter.grad = torch.full_like(parameter, value)


def test_gradients_are_moved_in_added_up_and_handed_back() -> None:
    members = parameters()
    bucket = make_bucket(members)
    for value, more in ((1.0, True), (10.0, True), (100.0, False)):
        for number, parameter in enumerate(members):
            set_grad(parameter, value * (number + 1))
            bucket.collect(parameter, more_to_come=more)
            assert parameter.grad is None, "there is one copy"
    bucket.hand_over()
    for number, parameter in enumerate(members):
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert torch.equal(parameter.grad, torch.full_like(parameter, 111.0 * (number + 1)))
        if parameter.numel():
            assert parameter.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


def test_a_bucket_that_was_handed_over_or_released_begins_anew() -> None:
    members = parameters()
    bucket = make_bucket(members)
    for finish in (bucket.hand_over, bucket.release, bucket.hand_over):
        for parameter in members:
            set_grad(parameter, 7.0)
            bucket.collect(parameter, more_to_come=False)
        assert all(bool((part == 7).all()) for part in bucket.flat_layout.cut(bucket.flat))
        finish()
        for parameter in members:
            parameter.grad = None


def test_gaps_are_zeros_even_where_something_was_before() -> None:
    members = parameters()
    bucket = make_bucket(members)
    for parameter in members:
        set_grad(parameter, 7.0)
        bucket.collect(parameter, more_to_come=False)
    bucket.hand_over()
    set_grad(members[0], 3.0)
    bucket.collect(members[0], more_to_come=False)
    bucket.fill_gaps()
    bucket.hand_over()
    assert [float(p.grad.sum()) for p in members if p.grad is not None] == [45.0, 0.0, 0.0, 0.0, 0.0]


def test_a_gradient_that_is_not_contiguous_lands_in_its_places() -> None:
    [parameter] = [nn.Parameter(torch.zeros(3, 5, dtype=F64))]
    bucket = make_bucket([parameter])
    for more in (True, False):
        parameter.grad = torch.arange(15.0, dtype=F64).view(5, 3).t()
        assert not parameter.grad.is_contiguous()
        bucket.collect(parameter, more_to_come=more)
    bucket.hand_over()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, 2 * torch.arange(15.0, dtype=F64).view(5, 3).t())


@pytest.mark.parametrize("wire", [F64, F32])
def test_a_gradient_that_fills_its_bucket_becomes_it_unless_sums_are_wider(wire: torch.dtype) -> None:
    [parameter] = [nn.Parameter(torch.zeros(4, ALIGNMENT, dtype=wire))]
    bucket = make_bucket([parameter], F64, wire)
    for more in (True, False):
        set_grad(parameter, 7.0)
        assert parameter.grad is not None
        came = parameter.grad.untyped_storage().data_ptr()
        bucket.collect(parameter, more_to_come=more)
        assert (bucket.flat.untyped_storage().data_ptr() == came) == (wire == F64 and more)
    assert float(bucket.narrow().sum()) == 14 * parameter.numel()
    bucket.hand_over()
    assert parameter.grad is not None
    assert parameter.grad.shape == parameter.shape
    assert bucket.flat.numel() == 0, "the gradient alone holds the memory, and frees it"
    set_grad(parameter, 1.0)  # the next step's
    bucket.collect(parameter, more_to_come=False)
    assert float(bucket.flat.sum()) == parameter.numel()


def test_release_frees_the_memory() -> None:
    members = parameters()
    bucket = make_bucket(members)
    bucket.fill_gaps()
    flat = weakref.ref(bucket.flat)
    bucket.release()
    gc.collect()
    assert flat() is None
    assert bucket.flat.numel() == 0


@pytest.mark.parametrize(("dtype", "kept"), [(F32, 1.0 + 3 / 1024), (BF16, 1.0)], ids=["fp32", "bf16"])
def test_sums_over_micro_batches_are_kept_in_the_dtype_asked_for(dtype: torch.dtype, kept: float) -> None:
    """1 / 1024 is too small for bf16 to see beside 1."""
    [parameter] = [nn.Parameter(torch.zeros(4, dtype=BF16))]
    bucket = make_bucket([parameter], dtype, BF16)
    for value, more in ((1.0, True), (1 / 1024, True), (1 / 1024, True), (1 / 1024, False)):
        set_grad(parameter, value)
        bucket.collect(parameter, more_to_come=more)
    assert bucket.flat.dtype == dtype
    assert float(bucket.flat[0]) == kept


# GradientCollector.


class Sent:
    """Remembers which buckets were sent, and what was in them."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.sums: list[float] = []

    def __call__(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        self.sums.append(float(bucket.flat.sum()))


def collecting(count: int = 4) -> tuple[list[nn.Parameter], list[Bucket], Sent, GradientCollector]:
    members = [nn.Parameter(torch.zeros(16, dtype=F64)) for _ in range(count)]
    buckets = [make_bucket([parameter]) for parameter in members]
    sent = Sent()
    return members, buckets, sent, GradientCollector(buckets, sent)


def use(members: list[nn.Parameter], weight: float = 1.0) -> None:
    backward(torch.stack([p.sum() for p in members]).sum() * weight)


@given(st.permutations(range(4)), st.integers(0, 4))
def test_buckets_are_sent_in_one_order_whatever_the_order_in_which_they_fill(order: list[int], used: int) -> None:
    members, buckets, sent, collector = collecting()
    for number in order[:used]:
        use([members[number]])
    leading = next((n for n in range(4) if n not in order[:used]), 4)
    assert sent.buckets == buckets[:leading], "each as soon as all before it are full"
    collector.flush()
    assert sent.buckets == buckets
    assert sent.sums == [16.0 if n in order[:used] else 0.0 for n in range(4)]
    collector.close()


def test_while_holding_nothing_is_sent_and_everything_is_kept() -> None:
    members, buckets, sent, collector = collecting()
    collector.holding = True
    use(members, 1.0)
    use(members[:2], 10.0)
    assert not sent.buckets
    collector.holding = False
    use(members[1:], 100.0)
    assert not sent.buckets, "the first one is waiting"
    collector.flush()
    assert sent.buckets == buckets
    assert sent.sums == [16 * value for value in (11.0, 111.0, 101.0, 101.0)]


def test_a_gradient_that_comes_twice_is_refused_not_added() -> None:
    members, _, _, collector = collecting()
    use(members[1:])
    with pytest.raises(RuntimeError, match="twice"):
        use(members[1:2])
    collector.close()


def test_after_closing_nobody_listens_and_nothing_is_kept() -> None:
    members, buckets, sent, collector = collecting()
    collector.close()
    alive = weakref.ref(collector)
    del collector
    gc.collect()
    assert alive() is None
    use(members)
    assert not sent.buckets
    for parameter in members:
        hooks: Any = parameter._post_accumulate_grad_hooks
        assert not hooks
        assert parameter.grad is not None
    assert all(not bucket.flat.numel() for bucket in buckets)


@pytest.mark.parametrize("reduce", [BF16, F32], ids=["reduce bf16", "reduce fp32"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_weight_used_twice_gets_the_same_gradient_in_every_step(reduce: torch.dtype, accumulation: int) -> None:
    """As a tied embedding is: the first step's gradient is the later ones', so that a resumed run is the same run."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8, generator=generator).to(BF16))
    x = torch.randn(5, 8, generator=generator).to(BF16)
    bucket = make_bucket([weight], F32, reduce)
    collector = GradientCollector([bucket], lambda _: None)
    found = []
    for _ in range(3):
        for number in range(accumulation):
            collector.holding = number < accumulation - 1
            backward((x @ weight @ weight).float().square().sum())
        collector.flush()
        found.append(bucket.flat.clone())
        bucket.hand_over()
        weight.grad = None
        collector.begin()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
    collector.close()
