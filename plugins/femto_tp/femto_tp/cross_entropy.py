"""The cross-entropy of logits that are cut on the vocabulary: no rank ever holds a whole row of them.

With m_k, s_k and t_k a rank's largest logit, its sum of exp(logit - m_k), and the target's logit where it holds it, the
loss of a row is log sum_k s_k exp(m_k - m) + m - t. A few numbers a row travel, in one all-gather for a chunk of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from femto_core.batch import IGNORE_INDEX
from femto_ops.cross_entropy import HeadBackward, HeadGradients, chunk_rows, kept_rows, wide
from femto_tp.head import VocabParallelHead
from femto_tp.ranks import Ranks


class VocabParallelCrossEntropy:
    """Takes the loss seat: next-token cross-entropy with the head cut on the vocabulary."""

    def __call__(self, hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
        assert isinstance(head, VocabParallelHead)
        reduce = partial(
            vocab_parallel_cross_entropy,
            targets=targets.flatten(),
            start=head.start,
            vocab=head.vocab,
            ranks=head.ranks,
            sums_input_grad=head.sums_input_grad,
        )
        result: Tensor = head(hidden.flatten(0, -2), reduce)
        return result


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int,
    vocab: int,
    ranks: Ranks,
    sums_input_grad: bool = True,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden @ weight^T over all ranks) against `targets`, summed over rows.

    Rows go through the head a chunk at a time, and their share of both gradients is computed while their logits exist,
    as in `femto_ops.cross_entropy.linear_cross_entropy`. Softmax is in fp32 (float64 for float64 input).

    Args:
        hidden: [n, h], alike on all ranks.
        weight: [rows of this rank, h]: the vocabulary from `start` on.
        targets: [n] int64, each in 0..vocab-1 or `IGNORE_INDEX`.
        start: first row of this rank.
        vocab: rows of all ranks.
        ranks: the tensor parallel group.
        sums_input_grad: all-reduce the gradient of `hidden`; otherwise it stays this rank's partial sum.
        label_smoothing: share of the target spread evenly over the whole vocabulary.
        chunk: rows of logits alive at once; by default as many as fit in `chunk_rows`' budget.

    Raises:
        IndexError: a target outside the vocabulary.
    """
    kept = kept_rows(targets, vocab, IGNORE_INDEX)
    widest = -(-vocab // ranks.size)  # of all ranks' parts, which differ by a row: every rank must cut rows alike
    rows = chunk_rows(widest, hidden.dtype, hidden.device) if chunk is None else chunk
    arguments = (start, vocab, ranks, sums_input_grad, label_smoothing, rows, torch.is_grad_enabled())
    return cast(Tensor, _VocabParallelCrossEntropy.apply(hidden, weight, targets, kept, *arguments))  # type: ignore[no-untyped-call]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        start: int,
        vocab: int,
        ranks: Ranks,
        sums_input_grad: bool,
        smoothing: float,
        chunk: int,
        grad: bool,
    ) -> Tensor:
        ctx.ranks, ctx.sums_input_grad, whole = ranks, sums_input_grad, hidden.shape
        need_hidden, need_weight = (grad and need for need in ctx.needs_input_grad[:2])
        if kept is not None:
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        dtype, mine = wide(hidden.dtype), weight.shape[0]
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        gradients = HeadGradients(hidden, weight, chunk, need_hidden=need_hidden, need_weight=need_weight)
        for rows, logits in gradients.chunks():
            probs = logits.to(dtype)  # [c, rows of this rank]
            target = targets[rows] - start  # [c]
            is_here = (target >= 0) & (target < mine)
            column = target.where(is_here, 0).unsqueeze(1)  # [c, 1]
            numbers = torch.zeros(4, len(target), dtype=dtype, device=hidden.device)
            if mine:
                numbers[0] = probs.amax(1)
                numbers[2] = probs.gather(1, column).squeeze(1) * is_here
                numbers[3] = probs.sum(1)
                probs.sub_(numbers[0].unsqueeze(1)).exp_()
                numbers[1] = probs.sum(1)
            else:
                numbers[0] = -torch.inf
            everyone, pending = ranks.start_gather(numbers)  # [size, 4, c]
            pending.wait()
            largest = everyone[:, 0].amax(0)  # [c]
            sums = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(0)
            aim = (1 - smoothing) * everyone[:, 2].sum(0)
            if smoothing:
                aim = aim + smoothing / vocab * everyone[:, 3].sum(0)
            total += (sums.log() + largest - aim).sum()
            if not (need_hidden or need_weight):
                continue
            probs.mul_(((numbers[0] - largest).exp() / sums).unsqueeze(1))  # the softmax over all ranks
            if smoothing:
                probs.sub_(smoothing / vocab)
            if mine:
                probs.scatter_add_(1, column, (is_here.to(dtype) * (smoothing - 1.0)).unsqueeze(1))
            gradients.take(rows, logits, probs)
        gradients.save(ctx, kept, whole)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = HeadBackward(ctx, grad)
        dhidden, pending = saved.hidden(), None
        if dhidden is not None and ctx.sums_input_grad:
            pending = ctx.ranks.start_sum(dhidden)
        dweight = saved.weight()
        if pending is not None:
            pending.wait()
        return saved.spread(dhidden), dweight, *[None] * 9
