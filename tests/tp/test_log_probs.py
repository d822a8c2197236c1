"""Token statistics over a vocabulary that is sharded, against the same over the whole one."""

from __future__ import annotations

import pytest
import torch

from femto_core.batch import IGNORE_INDEX
from femto_ops.memory import LiveBytes
from femto_ops.token_log_probs import TokenLogProbs, token_log_probs
from femto_tools.testing import WorkerPool
from femto_tp.cross_entropy import vocab_parallel_cross_entropy
from femto_tp.head import VocabParallelHead
from femto_tp.log_probs import vocab_parallel_log_probs
from femto_tp.token_statistics import VocabParallelStatistics
from tests.tp.tools import F64, all_ranks, close, counted, leaf, normal, parameter, places

ROWS, H = 13, 5


def some_targets(vocab: int, ignored: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    targets = torch.randint(vocab, (ROWS,), generator=generator)
    targets[0], targets[-1] = 0, vocab - 1
    return targets.masked_fill(torch.rand(ROWS, generator=generator) < ignored, IGNORE_INDEX)


def tensors_of(found: TokenLogProbs) -> list[torch.Tensor]:
    return [t for t in tuple(found) if t is not None]


def weighed(found: TokenLogProbs) -> torch.Tensor:
    """Return a sum that weighs every statistic of every row differently."""
    floating = [t for t in tensors_of(found) if t.is_floating_point()]
    return torch.stack([(t * normal(30 + at, *t.shape)).sum() for at, t in enumerate(floating)]).sum()


def equals_the_whole(vocab: int, entropy: bool, top: int, chunk: int | None) -> None:
    """Values and both gradients, with a hidden state that is not contiguous."""
    ranks = all_ranks()
    hidden, weight, targets = normal(1, H, ROWS).t(), normal(2, vocab, H), some_targets(vocab)
    ref_h, ref_w = leaf(hidden), leaf(weight)
    wanted = token_log_probs(ref_h, ref_w, targets, entropy=entropy, top=top)
    weighed(wanted).backward()  # type: ignore[no-untyped-call]
    assert ref_w.grad is not None
    mine = places(vocab, ranks)
    for sums in (True, False):
        ours, held = leaf(hidden), leaf(weight[mine])
        found = vocab_parallel_log_probs(
            ours,
            held,
            targets,
            start=mine.start,
            vocab=vocab,
            ranks=ranks,
            sums_input_grad=sums,
            entropy=entropy,
            top=top,
            chunk=chunk,
        )
        weighed(found).backward()  # type: ignore[no-untyped-call]
        assert len(tensors_of(found)) == len(tensors_of(wanted))
        for ours_, theirs in zip(tensors_of(found), tensors_of(wanted), strict=True):
            torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-12)
        assert ours.grad is not None
        close(ours.grad if sums else ranks.sum(ours.grad.clone()), ref_h.grad, "hidden")
        close(held.grad, ref_w.grad[mine], "weight")


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize(("vocab", "top"), [(37, 0), (37, 3), (37, 20), (37, 37), (3, 2), (3, 3)])
@pytest.mark.parametrize("entropy", [True, False], ids=["entropy", "no entropy"])
def test_values_and_gradients_equal_those_of_the_whole_vocabulary(
    pool: WorkerPool, vocab: int, top: int, entropy: bool, chunk: int | None
) -> None:
    """37 tokens: uneven shards, with fewer rows than `top`; 3 on 4 ranks: one rank holds none."""
    for world in (1, 2, 4):
        pool.run(world, equals_the_whole, vocab, entropy, top, chunk)


def ties(vocab: int, top: int) -> list[list[int]]:
    """Logits are small integers, so that most are equal and sums are exact under every layout."""
    ranks = all_ranks()
    mine = places(vocab, ranks)
    weight = (torch.arange(vocab, dtype=F64) * 7 % 5).unsqueeze(1)
    found = vocab_parallel_log_probs(
        torch.tensor([[1.0], [-1.0], [0.0]], dtype=F64),
        weight[mine],
        torch.tensor([0, 1, 2]),
        start=mine.start,
        vocab=vocab,
        ranks=ranks,
        sums_input_grad=True,
        entropy=False,
        top=top,
    )
    assert found.top_ids is not None
    ids: list[list[int]] = found.top_ids.tolist()
    return ids


@pytest.mark.parametrize("top", [1, 6, 15, 23])
def test_of_equal_logits_the_smaller_id_comes_first_on_every_layout(pool: WorkerPool, top: int) -> None:
    logits = [token * 7 % 5 for token in range(23)]
    wanted = [sorted(range(23), key=lambda token: (-sign * logits[token], token))[:top] for sign in (1, -1, 0)]
    for world in (1, 2, 4):
        assert pool.run(world, ties, 23, top) == [wanted] * world


def through_the_head() -> None:
    """Leading dimensions are flattened; hooks on the head see the tensors of the result."""
    ranks, vocab = all_ranks(), 37
    mine = places(vocab, ranks)
    hidden, weight, targets = normal(1, 2, ROWS, H), normal(2, vocab, H), some_targets(vocab).repeat(2, 1)
    head = VocabParallelHead(parameter(weight[mine]), mine.start, vocab, ranks, sums_input_grad=True)
    seen: list[torch.Tensor] = []
    head.register_forward_hook(
        lambda _module, _inputs, output: seen.extend(output if isinstance(output, tuple) else ())
    )
    statistics = VocabParallelStatistics()
    found = statistics.log_probs(hidden, head, targets, entropy=True, top=4)
    flat = hidden.flatten(0, -2), targets.flatten()
    wanted = token_log_probs(flat[0], weight, flat[1], entropy=True, top=4)
    for ours, theirs in zip(tensors_of(found), tensors_of(wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert [t is other for t, other in zip(seen, tensors_of(found), strict=True)] == [True] * 4
    bare = statistics.log_probs(hidden, head, targets)
    assert (bare.entropy, bare.top_log_probs, bare.top_ids) == (None, None, None)
    for smoothing in (0.0, 0.1):
        loss = statistics.cross_entropy(hidden, head, targets, label_smoothing=smoothing)
        close(
            loss,
            vocab_parallel_cross_entropy(
                flat[0], head.weight, flat[1], start=mine.start, vocab=vocab, ranks=ranks, label_smoothing=smoothing
            ),
        )
    close(-bare.log_probs.sum(), statistics.cross_entropy(hidden, head, targets), "log-probabilities and loss")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_seat_computes_inside_the_heads_call(pool: WorkerPool, world: int) -> None:
    pool.run(world, through_the_head)


def messages(top: int, sums: bool) -> list[tuple[str, int]]:
    ranks, vocab = all_ranks(), 37
    mine = places(vocab, ranks)
    hidden, held = leaf(normal(1, ROWS, H)), leaf(normal(2, vocab, H)[mine])
    with counted() as seen:
        found = vocab_parallel_log_probs(
            hidden,
            held,
            some_targets(vocab, ignored=0.0),
            start=mine.start,
            vocab=vocab,
            ranks=ranks,
            sums_input_grad=sums,
            entropy=True,
            top=top,
            chunk=8,
        )
        weighed(found).backward()  # type: ignore[no-untyped-call]
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_exchange_a_few_numbers_per_row_in_one_gather_per_chunk(pool: WorkerPool, world: int) -> None:
    for seen in pool.run(world, messages, 0, True):
        assert seen == [("all_gather", world * 4 * rows) for rows in (8, 5)] + [("all_reduce", ROWS * H)]
    for seen in pool.run(world, messages, 3, False):
        assert seen == [("all_gather", world * 10 * rows) for rows in (8, 5)]


def peak_bytes(rows: int) -> int:
    ranks, vocab, h = all_ranks(), 2048, 4
    mine = places(vocab, ranks)
    hidden, held = leaf(normal(1, rows, h).float()), leaf(normal(2, vocab, h).float()[mine])
    with LiveBytes(torch.device("cpu")) as counter:
        found = vocab_parallel_log_probs(
            hidden,
            held,
            torch.arange(rows) % vocab,
            start=mine.start,
            vocab=vocab,
            ranks=ranks,
            sums_input_grad=True,
            entropy=True,
            top=2,
            chunk=8,
        )
        found.log_probs.sum().backward()  # type: ignore[no-untyped-call]
        peak: int = counter.take_peak()
        return peak


def test_no_more_than_a_chunk_of_this_ranks_logits_is_ever_alive(pool: WorkerPool) -> None:
    """512 rows of 2048 tokens on 2 ranks: 2 MiB of logits per rank, 32 KiB in a chunk of 8 rows."""
    few, many = (max(pool.run(2, peak_bytes, rows)) for rows in (64, 512))
    assert many < 6 * 8 * 1024 * 4 + 448 * 256
    assert many - few < 448 * 256, "grows with hidden states and results, not with logits"


def outside() -> tuple[str, str]:
    ranks = all_ranks()
    mine = places(37, ranks)
    hidden, held = normal(1, 3, H), leaf(normal(2, 37, H)[mine])
    texts = []
    for targets, top in ((torch.tensor([1, 37, IGNORE_INDEX]), 0), (torch.tensor([1, 2, 3]), 38)):
        with pytest.raises((IndexError, ValueError)) as caught:
            vocab_parallel_log_probs(
                hidden,
                held,
                targets,
                start=mine.start,
                vocab=37,
                ranks=ranks,
                sums_input_grad=True,
                entropy=False,
                top=top,
            )
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_targets_and_top_are_refused_on_all_ranks_alike(pool: WorkerPool) -> None:
    """If one rank went on, it would wait for ever."""
    answers = pool.run(4, outside)
    assert len(set(answers)) == 1
    assert "target 37 at row 1 is outside the vocabulary 0..36" in answers[0][0]
    assert answers[0][1].startswith("top = 38: ")
