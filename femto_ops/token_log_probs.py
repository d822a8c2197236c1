"""Log-probabilities of target tokens, entropies and the most likely tokens, without ever holding the full logits.

Forward keeps one number per row, the log-normaliser; backward computes the logits again, chunk by chunk. The operation
is written for a slice of the vocabulary, so that a vocabulary-parallel head runs the same code.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from femto_ops.cross_entropy import HeadGradients, check_head_shapes, chunk_rows, kept_rows, logit_chunks
from femto_ops.vocab_slice import OutputGrads, Request, Saved, Statistics, VocabSlice


class TokenLogProbs(NamedTuple):  # a tuple, so that module hooks see its tensors
    """Statistics of n rows of logits, in fp32 (float64 for float64 input); 0 in rows that are ignored."""

    log_probs: Tensor
    """[n]: the log-probability of each row's target."""
    entropy: Tensor | None = None
    """[n], in nats; None unless asked for."""
    top_log_probs: Tensor | None = None
    """[n, k]: the k largest log-probabilities, in descending order; None for k = 0."""
    top_ids: Tensor | None = None
    """[n, k] int64: the tokens of `top_log_probs`; of equally likely tokens the smaller id comes first."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    entropy: bool,
    top: int,
    chunk: int | None = None,
) -> TokenLogProbs:
    """Return statistics of softmax(hidden @ weight^T) per row: the target's log-probability, entropy, the `top` tokens.

    Rows go through the head `chunk` at a time. Softmax is in fp32 (float64 for float64 input). The result is
    differentiable in `hidden` and `weight` through all three statistics. Saved for backward: the inputs, the
    log-normaliser [n], the entropy and the top ids; nothing is saved if neither input needs a gradient.

    Args:
        hidden: [n, h].
        weight: [v, h], dtype of `hidden`.
        targets: [n] int64, each in 0..v-1 or equal to `ignore_index`.
        ignore_index: the target of rows to skip: all their statistics are 0 and they add nothing to any gradient.
        entropy: whether to compute the entropy.
        top: how many of the most likely tokens to return, 0..v.
        chunk: rows of logits alive at a time; by default as many as fit in `chunk_rows`' budget.

    Raises:
        ValueError: a shape that does not fit, `chunk` < 1, or `top` outside 0..v.
        IndexError: a target outside the vocabulary; checking synchronises CUDA once per call.
    """
    check_head_shapes("token_log_probs", hidden, weight, targets)
    v = weight.shape[0]
    rows = chunk_rows(v, hidden.dtype, hidden.device) if chunk is None else chunk
    request = Request(VocabSlice(0, v), entropy, top, rows, ignore_index)
    return slice_log_probs(hidden, weight, targets, request)


def slice_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, request: Request) -> TokenLogProbs:
    """Compute `token_log_probs` where `weight` [rows held here, h] is the slice `request.part` of the vocabulary.

    All holders of the vocabulary call it together, with the same `hidden`, `targets` and `request` but for the slice.
    """
    vocab = request.part.vocab
    if not 0 <= request.top <= vocab:
        raise ValueError(f"top = {request.top}: a vocabulary of {vocab} tokens has from 0 to {vocab} most likely ones.")
    if request.chunk < 1:
        raise ValueError(f"chunk = {request.chunk}: at least one row of logits must be alive at a time.")
    kept = kept_rows(targets, vocab, request.ignore_index)
    # Grad mode is always off inside forward, and needs_input_grad ignores it.
    grad = torch.is_grad_enabled()
    found = _TokenLogProbs.apply(hidden, weight, targets, kept, request, grad)  # type: ignore[no-untyped-call]
    return TokenLogProbs(*found)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor | None, request: Request, grad: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.request = request
        ctx.set_materialize_grads(False)
        rows, targets = _take(hidden, kept), _take(targets, kept)
        statistics = Statistics(len(rows), hidden, request)
        for place, logits in logit_chunks(rows, weight, request.chunk):
            statistics.fill(place, logits, targets[place])
        entropy, top_ids = statistics.entropy, statistics.top_ids
        if grad and any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(hidden, weight, targets, kept, statistics.normaliser, entropy, top_ids)
        found = (statistics.log_probs, entropy, statistics.top_log_probs, top_ids)
        results = tuple(_spread(t, kept, len(hidden)) for t in found)
        if results[3] is not None:
            ctx.mark_non_differentiable(results[3])
        return results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, grad_top: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, kept, normaliser, entropy, top_ids = ctx.saved_tensors
        part: VocabSlice = ctx.request.part
        grads = OutputGrads(*(_take(g, kept) for g in (grad, grad_entropy, grad_top)))
        saved = Saved(targets, normaliser, entropy, top_ids)
        rows = _take(hidden, kept)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        gradients = HeadGradients(
            rows, weight, ctx.request.chunk, need_hidden=need_hidden, need_weight=need_weight, keep_logits=False
        )
        for place, logits in gradients.chunks():
            gradients.take(place, logits, grads.at(place).to_logits(logits, saved.at(place), part.start))
        dhidden, dweight = gradients.results()
        if dhidden is not None:
            dhidden = part.sum_input_grad(dhidden)
        return _spread(dhidden, kept, len(hidden)), dweight, *[None] * 4


@overload
def _take(tensor: Tensor, kept: Tensor | None) -> Tensor: ...
@overload
def _take(tensor: None, kept: Tensor | None) -> None: ...
def _take(tensor: Tensor | None, kept: Tensor | None) -> Tensor | None:
    """Return the rows of `tensor` that are `kept`; None for all."""
    return tensor if tensor is None or kept is None else tensor.index_select(0, kept)


def _spread(rows: Tensor | None, kept: Tensor | None, n: int) -> Tensor | None:
    """Return [n, ...] with `rows` at the places `kept` and 0 elsewhere; `rows` itself if all are kept."""
    if rows is None or kept is None:
        return rows
    return rows.new_zeros(n, *rows.shape[1:]).index_copy_(0, kept, rows)
