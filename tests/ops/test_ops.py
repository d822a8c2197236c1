"""The operations against their textbook forms: values, gradients, saved tensors, and edge cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import backward
from torch.utils.checkpoint import checkpoint

from femto_ops.cross_entropy import chunk_rows, linear_cross_entropy
from femto_ops.functions import rms_norm, swiglu
from femto_ops.memory import LiveBytes

EPS = 1e-5
# Bounds on max |got - want| / max |want|: a few ulps of fp32, two roundings of bf16 (2^-8 each).
BOUND = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 2**-7}


def textbook_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def textbook_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def textbook_loss(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    logits = hidden @ weight.t()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, reduction="sum", label_smoothing=smoothing)


def our_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def head_case(n: int = 7, h: int = 5, v: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(2))
    return randn(n, h, dtype=dtype), randn(v, h, dtype=dtype, seed=1), targets


def assert_same(got: Callable[..., Tensor], want: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Output and all gradients of `got` equal those of `want` to the bound of the inputs' dtype."""
    outputs = []
    for function in (got, want):
        y = function(*inputs)
        upstream = randn(*y.shape, dtype=y.dtype, seed=9).detach()
        outputs.append((y.detach(), *torch.autograd.grad(y, inputs, upstream)))
    for ours, theirs in zip(*outputs, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert error <= BOUND[inputs[0].dtype]


@contextmanager
def counted_saves() -> Iterator[list[Tensor]]:
    """Collect every tensor that autograd saves inside."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("shape", [(512, 64), (2, 3, 4, 16), (6,)], ids=str)
def test_rms_norm_equals_the_textbook(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_same(our_rms_norm, textbook_rms_norm, randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_swiglu_equals_the_textbook(dtype: torch.dtype) -> None:
    assert_same(swiglu, textbook_swiglu, randn(2, 33, 48, dtype=dtype), randn(2, 33, 48, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("chunk", [None, 32, 50], ids=["one chunk", "four chunks", "uneven chunks"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_linear_cross_entropy_equals_the_textbook(dtype: torch.dtype, chunk: int | None, smoothing: float) -> None:
    hidden, weight, targets = head_case(128, 32, 200, dtype)
    targets[::3] = -100
    assert_same(
        lambda h, w: linear_cross_entropy(h, w, targets, label_smoothing=smoothing, chunk=chunk),
        lambda h, w: textbook_loss(h, w, targets, smoothing),
        hidden,
        weight,
    )


def test_gradcheck_in_float64() -> None:
    x, weight = randn(2, 3, 5), randn(5, seed=1)
    assert torch.autograd.gradcheck(our_rms_norm, (x, weight))
    assert torch.autograd.gradcheck(swiglu, (x, randn(2, 3, 5, seed=3)))
    hidden, head, targets = head_case()
    targets[2] = -100

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return 0.3 * linear_cross_entropy(h, w, targets, label_smoothing=0.2, chunk=3)

    assert torch.autograd.gradcheck(loss, (hidden, head))


def test_a_second_derivative_raises() -> None:
    x = randn(3, 4)
    (grad,) = torch.autograd.grad(swiglu(x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        backward(grad.sum())


def test_mixed_dtypes_follow_promotion() -> None:
    y = rms_norm(randn(3, 8, dtype=torch.bfloat16), weight := randn(8, dtype=torch.float32), EPS)
    assert y.dtype == torch.float32
    backward(y.sum())
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_non_contiguous_inputs_and_gradients() -> None:
    x, up = randn(4, 6, 8).transpose(0, 1), randn(6, 4, 8, seed=1)
    assert_same(lambda a, w: rms_norm(a, w, EPS).transpose(0, 1), lambda a, w: textbook_rms_norm(a, w).transpose(0, 1),
                x, randn(8, seed=2))  # fmt: skip
    assert_same(our_rms_norm, textbook_rms_norm, randn(1, 8).expand(5, 8), randn(8, seed=2))
    assert_same(swiglu, textbook_swiglu, x, up)
    hidden, weight, targets = randn(32, 16).t(), randn(32, 50, seed=1).t(), torch.arange(16)
    assert_same(lambda h, w: linear_cross_entropy(h, w, targets, chunk=5),
                lambda h, w: textbook_loss(h, w, targets), hidden, weight)  # fmt: skip


def test_no_rows_give_no_output_and_zero_gradients() -> None:
    x, weight = randn(0, 8), randn(8)
    backward(rms_norm(x, weight, EPS).sum())
    backward(swiglu(x, x).sum())
    backward(linear_cross_entropy(x, head := randn(5, 8), torch.zeros(0, dtype=torch.int64)))
    assert x.grad is not None
    assert x.grad.shape == (0, 8)
    for parameter in (weight, head):
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_if_all_rows_are_ignored_the_loss_is_zero_and_not_nan() -> None:
    hidden, weight, targets = head_case()
    loss = linear_cross_entropy(hidden, weight, targets.fill_(-100))
    backward(loss)
    assert loss == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_an_ignored_row_may_hold_nan_and_adds_exactly_nothing() -> None:
    hidden, weight, targets = head_case()
    kept = targets != targets[0]
    rows = torch.where(kept.unsqueeze(1), hidden, torch.nan).detach().requires_grad_()
    loss = linear_cross_entropy(rows, weight, targets, ignore_index=int(targets[0]))
    few = hidden.detach()[kept].requires_grad_()
    alone = linear_cross_entropy(few, other := weight.detach().clone().requires_grad_(), targets[kept])
    backward(loss)
    backward(alone)
    assert torch.equal(loss, alone)
    assert weight.grad is not None
    assert other.grad is not None
    assert rows.grad is not None
    assert few.grad is not None
    assert torch.equal(weight.grad, other.grad)
    assert torch.equal(rows.grad[kept], few.grad)
    assert not rows.grad[~kept].any()


@pytest.mark.parametrize("target", [-1, 11, 2**40])
def test_a_target_outside_the_vocabulary_raises(target: int) -> None:
    hidden, weight, targets = head_case()
    targets[3] = target
    with pytest.raises(IndexError, match=rf"target {target} at row 3 is outside the vocabulary 0\.\.10 "):
        linear_cross_entropy(hidden, weight, targets)


def test_shapes_that_do_not_fit_raise() -> None:
    hidden, weight, targets = head_case()
    with pytest.raises(ValueError, match=r"not \[7, 5\], \[11, 5\], \[6\]"):
        linear_cross_entropy(hidden, weight, targets[:6])
    with pytest.raises(ValueError, match="chunk = 0"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match="the same shape and dtype"):
        swiglu(randn(3, 4), randn(1, 4))


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = head_case(dtype=torch.float32)
    assert_same(lambda h, w: linear_cross_entropy(h * 1e4, w, targets), lambda h, w: textbook_loss(h * 1e4, w, targets),
                hidden, weight)  # fmt: skip


def test_rms_norm_saves_its_inputs_and_one_number_a_row() -> None:
    x, weight = randn(6, 32, dtype=torch.float32), randn(32, dtype=torch.float32)
    with counted_saves() as saved:
        rms_norm(x, weight, EPS)
    assert [t.shape for t in saved] == [(6, 32), (32,), (6, 1)]
    assert [t.data_ptr() for t in saved[:2]] == [x.data_ptr(), weight.data_ptr()]


def test_swiglu_saves_its_inputs_only() -> None:
    gate, up = randn(6, 32), randn(6, 32, seed=1)
    with counted_saves() as saved:
        swiglu(gate, up)
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize(("chunk", "weight_bytes"), [(None, 2 * 40 * 8), (3, 4 * 40 * 8)])
def test_the_head_saves_its_gradients_and_no_logits(chunk: int | None, weight_bytes: int) -> None:
    hidden, weight, targets = head_case(10, 8, 40, torch.bfloat16)
    targets[:4] = -100
    with counted_saves() as saved:
        linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert [t.nbytes for t in saved] == [2 * 6 * 8, 8 * 6, weight_bytes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [None, 3])
def test_for_few_rows_the_logits_gradient_is_saved_instead_of_the_weights(
    dtype: torch.dtype, chunk: int | None
) -> None:
    hidden, weight, targets = head_case(9, 64, 200, dtype)
    targets[:2] = -100
    with counted_saves() as saved:
        loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert [list(t.shape) for t in saved] == [[7, 64], [7], [7, 200], [7, 64]]
    del loss, saved

    def with_loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, chunk=chunk)

    assert_same(with_loss_of, lambda h, w: textbook_loss(h, w, targets), hidden, weight)


def test_few_rows_of_a_long_vocabulary_take_less_memory_than_the_weights_gradient() -> None:
    hidden, weight, targets = head_case(8, 256, 4096, torch.bfloat16)
    with LiveBytes(torch.device("cpu")) as live:
        loss = linear_cross_entropy(hidden, weight, targets)
        assert live.take_peak() < weight.nbytes / 4
        backward(loss)
        assert live.take_peak() < 1.25 * weight.nbytes
    assert weight.grad is not None


def test_the_head_computes_only_the_gradients_that_are_needed() -> None:
    hidden, weight, targets = head_case()
    for frozen, other in ((hidden, weight), (weight, hidden)):
        with counted_saves() as saved:
            h, w = (t.detach() if t is frozen else t for t in (hidden, weight))
            loss = linear_cross_entropy(h, w, targets)
        assert [t.shape for t in saved] == [other.shape]
        other.grad = None
        backward(loss)
        (want,) = torch.autograd.grad(textbook_loss(hidden, weight, targets), other)
        torch.testing.assert_close(other.grad, want)
    with torch.no_grad(), counted_saves() as saved:
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad
    assert saved == []


def test_backward_twice_through_a_retained_graph_gives_the_same_gradients() -> None:
    hidden, weight, targets = head_case()
    loss = linear_cross_entropy(hidden, weight, targets) * 0.5
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_scale_of_a_bf16_gradient_is_not_rounded_to_bf16() -> None:
    hidden, weight, targets = head_case(64, 16, 50, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets)
    (unit,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss / 300, weight)
    # 1 / 300 in bf16 is off by 0.2 %; the roundings of 800 entries average out.
    ratio = (scaled.double() * unit.double()).sum() / unit.double().square().sum()
    assert float(ratio) * 300 == pytest.approx(1, abs=5e-4)


def test_checkpointing_changes_no_gradient_and_saves_inputs_only() -> None:
    x, norm, head, targets = randn(6, 8), randn(8, seed=1), randn(12, 8, seed=2), torch.arange(6)

    def block(x: Tensor) -> Tensor:
        y = rms_norm(x, norm, EPS)
        return linear_cross_entropy(swiglu(y, y), head, targets)

    want = torch.autograd.grad(block(x), (x, norm, head))
    with counted_saves() as saved:
        loss: Tensor = checkpoint(block, x, use_reentrant=False)
    assert sum(t.nbytes for t in saved) <= x.nbytes
    got = torch.autograd.grad(loss, (x, norm, head))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_chunk_of_logits_is_bounded_in_bytes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert chunk_rows(8192, torch.float32, cpu) == 1024
    assert chunk_rows(50257, torch.bfloat16, cpu) == 166
    assert chunk_rows(151936, torch.float32, cpu) == 128
    assert chunk_rows(50257, torch.bfloat16, cuda) == 667


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_cuda_agrees_with_the_textbook(dtype: torch.dtype) -> None:
    x, weight = (t.detach().cuda().requires_grad_() for t in (randn(64, 32, dtype=dtype), randn(32, dtype=dtype)))
    head, targets = randn(90, 32, dtype=dtype, seed=1).detach().cuda().requires_grad_(), torch.arange(64).cuda()
    assert_same(our_rms_norm, textbook_rms_norm, x, weight)
    assert_same(swiglu, textbook_swiglu, x, x)
    assert_same(lambda h, w: linear_cross_entropy(h, w, targets, chunk=20), lambda h, w: textbook_loss(h, w, targets),
                x, head)  # fmt: skip
