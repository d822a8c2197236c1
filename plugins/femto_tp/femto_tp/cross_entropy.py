"""Cross-entropy of logits that are sharded on the vocabulary: no rank ever holds a whole row of them.

For one row, let m_k be rank k's largest logit, s_k its sum of exp(logit - m_k), m the largest m_k, and t the target's
logit. The loss is log sum_k s_k exp(m_k - m) + m - t. One all-gather per chunk exchanges a few numbers per row.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femto_core.batch import IGNORE_INDEX
from femto_ops.cross_entropy import HeadBackward, HeadGradients, chunk_rows, kept_rows, wide
from femto_ops.vocab_slice import columns_of
from femto_tp.ranks import Ranks
from femto_tp.vocab import RankSlice


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
    """Return what `femto_ops.cross_entropy.linear_cross_entropy` does for the whole weight, the same on all ranks.

    Args:
        hidden: [n, h], the same on all ranks.
        weight: [rows of this rank, h]: tokens `start` and after; a rank may hold none.
        targets: [n] int64, each in 0..vocab-1 or `IGNORE_INDEX`.
        start: first token of this rank.
        vocab: rows of all ranks.
        ranks: the tensor parallel group.
        sums_input_grad: all-reduce the gradient of `hidden`; otherwise it stays this rank's partial sum.
        label_smoothing: share of the target spread evenly over the whole vocabulary.
        chunk: rows of logits alive at a time, equal on all ranks; by default as many as fit in `chunk_rows`' budget.

    Raises:
        IndexError: a target outside the vocabulary.
    """
    kept = kept_rows(targets, vocab, IGNORE_INDEX)
    widest = -(-vocab // ranks.size)  # slices differ by a row, but all ranks must cut the same chunks
    rows = chunk_rows(widest, hidden.dtype, hidden.device) if chunk is None else chunk
    request = _Request(RankSlice(start, vocab, ranks, sums_input_grad), label_smoothing, rows)
    # Grad mode is always off inside forward, and needs_input_grad ignores it.
    arguments = (hidden, weight, targets, kept, request, torch.is_grad_enabled())
    return cast(Tensor, _VocabParallelCrossEntropy.apply(*arguments))  # type: ignore[no-untyped-call]


@attrs.frozen
class _Request:
    part: RankSlice
    smoothing: float
    chunk: int
    """Rows of logits alive at a time; equal on all ranks."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor | None, request: _Request, grad: bool
    ) -> Tensor:
        ctx.part, whole = request.part, hidden.shape
        need_hidden, need_weight = (grad and need for need in ctx.needs_input_grad[:2])
        if kept is not None:
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        gradients = HeadGradients(hidden, weight, request.chunk, need_hidden=need_hidden, need_weight=need_weight)
        for rows, logits in gradients.chunks():
            chunk = _Chunk(logits.to(total.dtype), targets[rows], request)
            total += chunk.loss()
            if need_hidden or need_weight:
                gradients.take(rows, logits, chunk.logits_gradient())
        gradients.save(ctx, kept, whole)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = HeadBackward(ctx, grad)
        dhidden, pending = saved.hidden(), None
        if dhidden is not None and ctx.part.sums_input_grad:
            pending = ctx.part.ranks.start_sum(dhidden)
        dweight = saved.weight()
        if pending is not None:
            pending.wait()
        return saved.spread(dhidden), dweight, *[None] * 4


class _Chunk:
    """A chunk's logits [c, rows of this rank]; overwritten by exp(logits - m), later by the loss's gradient."""

    def __init__(self, logits: Tensor, targets: Tensor, request: _Request) -> None:
        """Exchange four numbers per row: m, the sum of exp(logits - m), the target's logit, the sum of logits."""
        self._logits, self._request, self._held = logits, request, logits.shape[1]
        column, is_here = columns_of(targets.unsqueeze(1), request.part.start, self._held)
        self._column, self._is_here = column, is_here  # [c, 1]
        numbers = logits.new_zeros(4, len(targets))
        self._largest_here = numbers[0]  # [c]
        if self._held:
            numbers[0] = logits.amax(1)
            numbers[2] = logits.gather(1, column).where(is_here, 0).squeeze(1)
            numbers[3] = logits.sum(1)
            logits.sub_(numbers[0].unsqueeze(1)).exp_()
            numbers[1] = logits.sum(1)
        else:
            numbers[0] = -torch.inf
        self._everyone = request.part.gather(numbers)  # [size, 4, c]
        self._largest = self._everyone[:, 0].amax(0)  # [c]
        self._sums = (self._everyone[:, 1] * (self._everyone[:, 0] - self._largest).exp()).sum(0)

    def loss(self) -> Tensor:
        """Return the loss, summed over the chunk."""
        smoothing, everyone = self._request.smoothing, self._everyone
        aim = (1 - smoothing) * everyone[:, 2].sum(0)
        if smoothing:
            aim = aim + smoothing / self._request.part.vocab * everyone[:, 3].sum(0)
        return (self._sums.log() + self._largest - aim).sum()

    def logits_gradient(self) -> Tensor:
        """Return the loss's gradient with respect to this rank's logits, in their memory."""
        smoothing = self._request.smoothing
        gradient = self._logits.mul_(((self._largest_here - self._largest).exp() / self._sums).unsqueeze(1))  # softmax
        if smoothing:
            gradient.sub_(smoothing / self._request.part.vocab)
        if self._held:
            gradient.scatter_add_(1, self._column, self._is_here.to(gradient.dtype) * (smoothing - 1.0))
        return gradient
