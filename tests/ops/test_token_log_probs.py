"""Token log-probabilities, entropies and top tokens against log_softmax of the full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import backward

from femto_ops.cross_entropy import linear_cross_entropy
from femto_ops.memory import LiveBytes
from femto_ops.token_log_probs import TokenLogProbs, token_log_probs
from femto_ops.top_k import largest
from tests.ops.test_ops import counted_saves, head_case, randn

N, H, V = 9, 5, 23


def textbook(hidden: Tensor, weight: Tensor, targets: Tensor, top: int) -> TokenLogProbs:
    logits = hidden @ weight.t()
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    kept = targets != -100
    found = log_p.gather(1, targets.where(kept, 0).unsqueeze(1)).squeeze(1)
    values, ids = log_p.sort(dim=1, descending=True, stable=True)
    return TokenLogProbs(
        log_probs=found.where(kept, 0),
        entropy=-(log_p.exp() * log_p).sum(1).where(kept, 0),
        top_log_probs=values[:, :top].where(kept.unsqueeze(1), 0),
        top_ids=ids[:, :top].where(kept.unsqueeze(1), 0),
    )


def case(dtype: torch.dtype = torch.float64, ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = head_case(N, H, V, dtype)
    if ignored:
        targets[::4] = -100
    return hidden, weight, targets


def scalar(found: TokenLogProbs, used: str) -> Tensor:
    """Return a sum that weighs every used statistic of every row differently."""
    total = torch.zeros((), dtype=found.log_probs.dtype)
    for seed, name in enumerate(("log_probs", "entropy", "top_log_probs")):
        tensor: Tensor | None = getattr(found, name)
        if tensor is not None and name[0] in used:
            total = total + (tensor * randn(*tensor.shape, seed=20 + seed).detach().to(tensor.dtype)).sum()
    return total


def assert_close(found: TokenLogProbs, wanted: TokenLogProbs, bound: float) -> None:
    for name in ("log_probs", "entropy", "top_log_probs"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("chunk", [None, 1, 4, N])
@pytest.mark.parametrize("ignored", [True, False], ids=["ignored rows", "all rows"])
@pytest.mark.parametrize("top", [1, 3, V])
def test_values_and_gradients_equal_the_textbook(chunk: int | None, ignored: bool, top: int) -> None:
    hidden, weight, targets = case(ignored=ignored)
    found = token_log_probs(hidden, weight, targets, entropy=True, top=top, chunk=chunk)
    wanted = textbook(hidden, weight, targets, top)
    assert_close(found, wanted, 1e-13)
    assert found.top_ids is not None
    assert wanted.top_ids is not None
    assert torch.equal(found.top_ids, wanted.top_ids)
    assert not found.top_ids.requires_grad
    for used in ("l", "e", "t", "let"):
        got = torch.autograd.grad(scalar(found, used), (hidden, weight), retain_graph=True)
        want = torch.autograd.grad(scalar(wanted, used), (hidden, weight), retain_graph=True)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, msg=used)


def test_gradcheck_in_float64() -> None:
    hidden, weight, targets = case()

    def all_three(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = token_log_probs(hidden, weight, targets, entropy=True, top=2, chunk=4)
        return tuple(t for t in (found.log_probs, found.entropy, found.top_log_probs) if t is not None)

    assert torch.autograd.gradcheck(all_three, (hidden, weight))


def test_what_is_not_asked_for_is_none_and_changes_nothing_else() -> None:
    hidden, weight, targets = case()
    full = token_log_probs(hidden, weight, targets, entropy=True, top=4)
    alone = token_log_probs(hidden, weight, targets, entropy=False, top=0)
    assert (alone.entropy, alone.top_log_probs, alone.top_ids) == (None, None, None)
    assert torch.equal(alone.log_probs, full.log_probs)
    got = torch.autograd.grad(scalar(alone, "l"), (hidden, weight))
    want = torch.autograd.grad(scalar(full, "l"), (hidden, weight))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


def test_the_sum_of_log_probs_is_minus_the_cross_entropy() -> None:
    hidden, weight, targets = case()
    found = token_log_probs(hidden, weight, targets, entropy=False, top=0, chunk=2).log_probs.sum()
    loss = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(-found, loss, rtol=1e-13, atol=0)


def test_ignored_rows_are_zero_and_may_hold_nan() -> None:
    hidden, weight, targets = case()
    kept = targets != -100
    rows = torch.where(kept.unsqueeze(1), hidden, torch.nan).detach().requires_grad_()
    found = token_log_probs(rows, weight, targets, entropy=True, top=2)
    for tensor in (found.log_probs, found.entropy, found.top_log_probs, found.top_ids):
        assert tensor is not None
        assert not tensor[~kept].any()
    got, dweight = torch.autograd.grad(scalar(found, "let"), (rows, weight))
    assert not got[~kept].any()
    assert dweight.isfinite().all()


@pytest.mark.parametrize("n", [0, 4], ids=["no rows", "all rows ignored"])
def test_without_rows_statistics_and_gradients_are_zero(n: int) -> None:
    hidden, weight, targets = randn(n, H), randn(V, H, seed=1), torch.full((n,), -100)
    found = token_log_probs(hidden, weight, targets, entropy=True, top=3)
    assert found.top_log_probs is not None
    assert found.top_ids is not None
    assert found.top_log_probs.shape == found.top_ids.shape == (n, 3)
    assert not found.log_probs.any()
    for gradient, like in zip(
        torch.autograd.grad(scalar(found, "let"), (hidden, weight)), (hidden, weight), strict=True
    ):
        assert gradient.shape == like.shape
        assert not gradient.any()


@pytest.mark.parametrize("chunk", [None, 2])
def test_bf16_has_an_fp32_softmax(chunk: int | None) -> None:
    """Values equal those of fp32 arithmetic on the very same bf16 logits; gradients are rounded to bf16."""
    hidden, weight, targets = case(torch.bfloat16)
    found = token_log_probs(hidden, weight, targets, entropy=True, top=3, chunk=chunk)
    wanted = textbook(hidden, weight, targets, 3)
    assert found.log_probs.dtype == torch.float32
    assert_close(found, wanted, 2e-6)
    got = torch.autograd.grad(scalar(found, "let"), (hidden, weight))
    want = torch.autograd.grad(scalar(wanted, "let"), (hidden, weight))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs.double()).abs().max() <= 2**-6 * theirs.double().abs().max()


def test_logits_of_thousands_stay_finite() -> None:
    hidden, weight, targets = case(torch.float32)
    scaled = (hidden.detach() * 1e4).requires_grad_()
    found = token_log_probs(scaled, weight, targets, entropy=True, top=2)
    assert_close(found, textbook(scaled, weight, targets, 2), 1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(scalar(found, "let"), (scaled, weight)))


def test_of_equal_logits_the_smaller_id_comes_first() -> None:
    weight = torch.tensor([[1.0], [2.0], [1.0], [2.0], [1.0], [0.0]])
    found = token_log_probs(torch.ones(1, 1), weight, torch.zeros(1, dtype=torch.int64), entropy=False, top=4)
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[1, 3, 0, 2]]


def test_the_largest_of_many_ties_are_those_of_a_stable_sort() -> None:
    values = torch.randint(0, 7, (50, 300), generator=torch.Generator().manual_seed(3)).float()
    wanted, columns = values.sort(dim=1, descending=True, stable=True)
    for k in (1, 2, 20, 60, 300):
        found, ids = largest(values, k)
        assert torch.equal(found, wanted[:, :k])
        assert torch.equal(ids, columns[:, :k])


def test_forward_saves_its_inputs_and_a_few_numbers_per_row() -> None:
    hidden, weight, targets = case(ignored=False)
    with counted_saves() as saved:
        token_log_probs(hidden, weight, targets, entropy=True, top=2)
    assert [t.shape for t in saved] == [(N, H), (V, H), (N,), (N,), (N,), (N, 2)]
    assert [t.data_ptr() for t in saved[:2]] == [hidden.data_ptr(), weight.data_ptr()]


def test_nothing_is_saved_when_no_gradient_is_needed() -> None:
    hidden, weight, targets = case()
    with counted_saves() as saved:
        found = token_log_probs(hidden.detach(), weight.detach(), targets, entropy=True, top=2)
        with torch.no_grad():
            token_log_probs(hidden, weight, targets, entropy=True, top=2)
    assert saved == []
    assert not found.log_probs.requires_grad


def test_only_the_gradient_that_is_needed_is_computed() -> None:
    hidden, weight, targets = case()
    for frozen in (hidden, weight):
        h, w = (t.detach() if t is frozen else t for t in (hidden, weight))
        found = token_log_probs(h, w, targets, entropy=True, top=2)
        other = weight if frozen is hidden else hidden
        (got,) = torch.autograd.grad(scalar(found, "let"), other)
        (want,) = torch.autograd.grad(scalar(textbook(hidden, weight, targets, 2), "let"), other)
        torch.testing.assert_close(got, want)


def test_no_more_than_a_chunk_of_logits_is_ever_alive() -> None:
    """512 rows of 2048 tokens are 4 MiB of logits; a chunk of 8 rows is 64 KiB, and at most six such are alive."""
    rows, v, h, chunk = 512, 2048, 4, 8
    hidden, weight = randn(rows, h, dtype=torch.float32), randn(v, h, dtype=torch.float32, seed=1)
    targets = torch.arange(rows) % v
    with LiveBytes(torch.device("cpu")) as live:
        found = token_log_probs(hidden, weight, targets, entropy=True, top=4, chunk=chunk)
        backward(scalar(found, "let"))
        peak = live.take_peak()
    per_row = 40 * 4 * rows  # results, their gradients and those of hidden states
    assert peak < 6 * 4 * chunk * v + 3 * weight.nbytes + 3 * per_row < 4 * rows * v / 4


def test_the_gradient_of_a_bf16_weight_is_summed_over_chunks_in_fp32() -> None:
    """Each of 512 rows adds 1/512 of the same gradient: a sum in bf16 would stop growing early."""
    n = 512
    hidden, weight = torch.ones(n, 2, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.bfloat16, requires_grad=True)
    found = token_log_probs(hidden, weight, torch.zeros(n, dtype=torch.int64), entropy=False, top=0, chunk=1)
    backward(found.log_probs.sum())
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [384.0, -128.0, -128.0, -128.0]


def test_wrong_input_is_refused_in_one_sentence() -> None:
    hidden, weight, targets = case()
    with pytest.raises(ValueError, match=r"^token_log_probs takes .* not \[9, 5\], \[23, 5\], \[6\]\.$"):
        token_log_probs(hidden, weight, targets[:6], entropy=False, top=0)
    with pytest.raises(ValueError, match="chunk = 0"):
        token_log_probs(hidden, weight, targets, entropy=False, top=0, chunk=0)
    for top in (-1, V + 1):
        with pytest.raises(ValueError, match=rf"^top = {top}: .*from 0 to 23"):
            token_log_probs(hidden, weight, targets, entropy=False, top=top)
    for target in (-1, V, 2**40):
        targets[3] = target
        with pytest.raises(IndexError, match=rf"target {target} at row 3 is outside the vocabulary 0\.\.22 "):
            token_log_probs(hidden, weight, targets, entropy=False, top=0)
