"""Cross-entropy over a sharded vocabulary, against torch's own over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from femto_core.batch import IGNORE_INDEX
from femto_ops.cross_entropy import chunk_rows
from femto_ops.memory import LiveBytes
from femto_tools.testing import WorkerPool
from femto_tp.cross_entropy import vocab_parallel_cross_entropy
from femto_tp.head import VocabParallelHead
from femto_tp.token_statistics import VocabParallelStatistics
from tests.tp.tools import F64, all_ranks, close, counted, leaf, normal, parameter, places

BF16, F32 = torch.bfloat16, torch.float32


def some_targets(rows: int, vocab: int, ignored: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[0], targets[-1] = 0, vocab - 1
    return targets.masked_fill(torch.rand(rows, generator=generator) < ignored, IGNORE_INDEX)


def equals_torch(vocab: int, smoothing: float, ignored: float, chunk: int | None, scale: float) -> None:
    """Compare loss and both gradients, for an upstream gradient and a hidden state that is not contiguous."""
    ranks, rows, h = all_ranks(), 13, 5
    hidden, weight = scale * normal(1, h, rows).t(), normal(2, vocab, h)
    targets = some_targets(rows, vocab, ignored)
    ref_h, ref_w = leaf(hidden), leaf(weight)
    if smoothing:  # torch divides a smoothed sum by the same vocabulary
        wanted = F.cross_entropy(
            F.linear(ref_h, ref_w), targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
        )
    else:
        wanted = F.cross_entropy(F.linear(ref_h, ref_w), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    (wanted * 0.37).backward()  # type: ignore[no-untyped-call]

    mine = places(vocab, ranks)
    held, before = leaf(weight[mine]), hidden.clone()
    for sums in (True, False):
        ours, held.grad = leaf(hidden), None
        found = vocab_parallel_cross_entropy(
            ours,
            held,
            targets,
            start=mine.start,
            vocab=vocab,
            ranks=ranks,
            sums_input_grad=sums,
            label_smoothing=smoothing,
            chunk=chunk,
        )
        (found * 0.37).backward()  # type: ignore[no-untyped-call]
        assert found.dtype == F64
        close(found, wanted, "loss")
        assert ours.grad is not None
        close(ours.grad if sums else ranks.sum(ours.grad.clone()), ref_h.grad, "hidden")
        assert ref_w.grad is not None
        close(held.grad, ref_w.grad[mine], "weight")
    close(ours, before, "the input is left alone")
    with torch.no_grad():
        again = vocab_parallel_cross_entropy(
            hidden, held, targets, start=mine.start, vocab=vocab, ranks=ranks, label_smoothing=smoothing, chunk=chunk
        )
    close(again, wanted, "without gradients")


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("vocab", "ignored"), [(37, 0.3), (8, 0.0), (3, 0.5)])
def test_it_equals_torchs_over_the_whole_vocabulary(
    pool: WorkerPool, vocab: int, ignored: float, smoothing: float, chunk: int | None
) -> None:
    """37 tokens on 2 and 4 ranks are uneven; of 3 tokens on 4 ranks, one rank holds none."""
    for world in (2, 4):
        pool.run(world, equals_torch, vocab, smoothing, ignored, chunk, 1.0)


def test_logits_of_hundreds_neither_overflow_nor_vanish(pool: WorkerPool) -> None:
    """Logits reach 600 on one rank and -600 on another: exp() of them would be inf or 0."""
    pool.run(4, equals_torch, 37, 0.0, 0.0, None, 300.0)


def all_ignored() -> tuple[float, bool]:
    ranks = all_ranks()
    mine = places(37, ranks)
    hidden, held = leaf(normal(1, 6, 5)), leaf(normal(2, 37, 5)[mine])
    targets = torch.full((6,), IGNORE_INDEX)
    loss = vocab_parallel_cross_entropy(hidden, held, targets, start=mine.start, vocab=37, ranks=ranks)
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert held.grad is not None
    empty = vocab_parallel_cross_entropy(
        leaf(normal(1, 0, 5)), held, targets[:0], start=mine.start, vocab=37, ranks=ranks
    )
    assert float(empty) == 0.0
    return float(loss), bool(hidden.grad.any() or held.grad.any())


@pytest.mark.parametrize("world", [2, 4])
def test_all_rows_ignored_is_a_loss_and_gradients_of_zero(pool: WorkerPool, world: int) -> None:
    assert pool.run(world, all_ignored) == [(0.0, False)] * world


def uniform() -> float:
    """With equal logits, a row's loss is log(vocabulary), whatever the number of ranks."""
    ranks = all_ranks()
    mine = places(37, ranks)
    held = torch.zeros(mine.stop - mine.start, 5, dtype=F64)
    targets = torch.arange(37)
    loss = vocab_parallel_cross_entropy(normal(1, 37, 5), held, targets, start=mine.start, vocab=37, ranks=ranks)
    return float(loss) / 37


@pytest.mark.parametrize("world", [2, 4])
def test_there_is_no_extra_log_of_the_number_of_ranks(pool: WorkerPool, world: int) -> None:
    for found in pool.run(world, uniform):
        assert found == pytest.approx(math.log(37), rel=1e-14)


def outside(target: int) -> str:
    ranks = all_ranks()
    mine = places(37, ranks)
    targets = torch.tensor([1, target, IGNORE_INDEX])
    with pytest.raises(IndexError) as caught:
        vocab_parallel_cross_entropy(
            normal(1, 3, 5), leaf(normal(2, 37, 5)[mine]), targets, start=mine.start, vocab=37, ranks=ranks
        )
    return str(caught.value)


@pytest.mark.parametrize("target", [37, -1, -101, 1000])
def test_a_target_outside_the_vocabulary_is_refused_on_all_ranks_alike(pool: WorkerPool, target: int) -> None:
    """If one rank went on, it would wait for ever. Target 37 would be the first row of padding, if there were any."""
    answers = pool.run(4, outside, target)
    assert len(set(answers)) == 1
    assert f"target {target} at row 1 is outside the vocabulary 0..36" in answers[0]


def in_bf16(scale: float) -> dict[str, float]:
    """Compare with float64 arithmetic on the very same bf16 logits."""
    ranks, vocab, rows, h = all_ranks(), 3000, 64, 8
    mine = places(vocab, ranks)
    hidden, weight = normal(1, rows, h, dtype=BF16), normal(2, vocab, h, dtype=BF16)
    targets = torch.arange(rows) * 40
    ours, held = leaf(hidden), leaf(weight[mine])
    found = vocab_parallel_cross_entropy(ours, held, targets, start=mine.start, vocab=vocab, ranks=ranks, chunk=20)
    (found * scale).backward()  # type: ignore[no-untyped-call]
    logits = F.linear(hidden, weight).double().requires_grad_()
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    wanted.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    dhidden, dweight = logits.grad @ weight.double() * scale, logits.grad.t() @ hidden.double() * scale
    assert found.dtype == torch.float32
    assert ours.grad is not None
    assert held.grad is not None
    assert ours.grad.dtype == held.grad.dtype == BF16
    # Roundings of single elements cancel out here, and an error common to all gradients remains.
    bias = float((ours.grad.double() * dhidden).sum() / dhidden.square().sum()) - 1
    bias_w = float((held.grad.double() * dweight[mine]).sum() / dweight[mine].square().sum()) - 1
    return {
        "loss": abs(float(found.detach()) / float(wanted.detach()) - 1),
        "hidden": float((ours.grad.double() - dhidden).abs().max() / dhidden.abs().max()),
        "weight": float((held.grad.double() - dweight[mine]).abs().max() / dweight[mine].abs().max()),
        "bias of hidden": abs(bias),
        "bias of weight": abs(bias_w),
    }


@pytest.mark.parametrize("scale", [1.0, 1 / 2049])
def test_bf16_logits_have_an_fp32_softmax(pool: WorkerPool, scale: float) -> None:
    """A loss summed in bf16 would be off by 1e-3 or more; nor is the scale rounded to bf16."""
    for found in pool.run(2, in_bf16, scale):
        assert found["loss"] < 1e-6
        assert found["hidden"] < 2e-2
        assert found["weight"] < 2e-2
        assert found["bias of hidden"] < 1e-3
        assert found["bias of weight"] < 1e-3


# Memory and messages.


def peak_bytes(rows: int, chunk: int, grad: bool) -> int:
    ranks, vocab, h = all_ranks(), 2048, 4
    mine = places(vocab, ranks)
    hidden, weight = normal(1, rows, h, dtype=torch.float32), normal(2, vocab, h, dtype=torch.float32)[mine]
    targets = torch.arange(rows) % vocab
    hidden.requires_grad_(grad), weight.requires_grad_(grad)
    with LiveBytes(torch.device("cpu")) as counter, torch.set_grad_enabled(grad):
        loss = vocab_parallel_cross_entropy(
            hidden, weight, targets, start=mine.start, vocab=vocab, ranks=ranks, chunk=chunk
        )
        if grad:
            loss.backward()  # type: ignore[no-untyped-call]
        peak: int = counter.take_peak()
        return peak


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_no_more_than_a_chunk_of_this_ranks_logits_is_ever_alive(pool: WorkerPool, grad: bool) -> None:
    """512 rows of 2048 tokens on 2 ranks: 4 MiB of logits, 2 MiB per rank, 32 KiB in a chunk of 8 rows."""
    few, many = (max(pool.run(2, peak_bytes, rows, 8, grad)) for rows in (64, 512))
    chunk, hidden, weight = 8 * 1024 * 4, 512 * 4 * 4, 1024 * 4 * 4
    rest = 2 * hidden + 3 * weight + 512 * 8 * 4  # gradients of both with their scaled copies, and the targets
    assert many < 3 * chunk + rest < 512 * 1024 * 4 / 4
    assert many - few < 4 * 448 * (4 * 4 + 8), "grows with hidden states and targets, not with logits"


def chunks_of_all_ranks(vocab: int) -> None:
    """Use a number of rows that one rank's own budget would divide into two chunks, and another's would not."""
    ranks = all_ranks()
    mine = places(vocab, ranks)
    rows = chunk_rows(len(range(vocab)[mine]), F32, torch.device("cpu"))
    most = ranks.gather(torch.tensor([rows]), 0).max()
    hidden, held = leaf(normal(1, int(most), 2).float()), leaf(normal(2, vocab, 2).float()[mine])
    targets = some_targets(int(most), vocab, 0.0)
    with counted() as seen:
        vocab_parallel_cross_entropy(hidden, held, targets, start=mine.start, vocab=vocab, ranks=ranks)
    counts = ranks.gather(torch.tensor([len(seen)]), 0)
    assert len(set(counts.tolist())) == 1, counts


def test_ranks_with_unequal_shares_cut_the_rows_alike(pool: WorkerPool) -> None:
    """5793 tokens on 2 ranks: 2897 and 2896, for which the budgets are 2895 and 2896 rows."""
    pool.run(2, chunks_of_all_ranks, 5793)


def messages(rows: int, chunk: int | None, sums: bool) -> list[tuple[str, int]]:
    ranks = all_ranks()
    mine = places(37, ranks)
    hidden, held = leaf(normal(1, rows, 5)), leaf(normal(2, 37, 5)[mine])
    head = VocabParallelHead(parameter(held), mine.start, 37, ranks, sums_input_grad=sums)
    targets = some_targets(rows, 37, 0.0)
    with counted() as seen:
        if chunk is None:
            loss = VocabParallelStatistics().cross_entropy(hidden.view(1, rows, 5), head, targets.view(1, rows))
        else:
            loss = vocab_parallel_cross_entropy(
                hidden, held, targets, start=mine.start, vocab=37, ranks=ranks, sums_input_grad=sums, chunk=chunk
            )
        loss.backward()  # type: ignore[no-untyped-call]
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_exchange_four_numbers_a_row_and_one_gradient(pool: WorkerPool, world: int) -> None:
    for seen in pool.run(world, messages, 10, None, True):
        assert seen == [("all_gather", world * 4 * 10), ("all_reduce", 10 * 5)]
    for seen in pool.run(world, messages, 10, 4, False):
        assert seen == [("all_gather", world * 4 * rows) for rows in (4, 4, 2)]
