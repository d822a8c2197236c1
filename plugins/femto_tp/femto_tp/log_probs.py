"""Token log-probabilities, entropies and top tokens with the head sharded on the vocabulary.

No rank holds a whole row of logits. A few numbers per row travel, in one all-gather per chunk of rows: see
`femto_ops.vocab_slice`.
"""

from __future__ import annotations

from torch import Tensor

from femto_core.batch import IGNORE_INDEX
from femto_ops.cross_entropy import check_head_shapes, chunk_rows
from femto_ops.token_log_probs import TokenLogProbs, slice_log_probs
from femto_ops.vocab_slice import Request
from femto_tp.ranks import Ranks
from femto_tp.vocab import RankSlice


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int,
    vocab: int,
    ranks: Ranks,
    sums_input_grad: bool,
    entropy: bool,
    top: int,
    chunk: int | None = None,
) -> TokenLogProbs:
    """Return what `femto_ops.token_log_probs.token_log_probs` does for the whole weight, the same on all ranks.

    Args:
        hidden: [n, h], the same on all ranks.
        weight: [rows of this rank, h]: tokens `start` and after; a rank may hold none.
        targets: [n] int64, each in 0..vocab-1 or `IGNORE_INDEX`.
        start: first token of this rank.
        vocab: rows of all ranks.
        ranks: the tensor parallel group.
        sums_input_grad: all-reduce the gradient of `hidden`; otherwise it stays this rank's partial sum.
        entropy: whether to compute the entropy.
        top: how many of the most likely tokens of the whole vocabulary to return.
        chunk: rows of logits alive at a time, equal on all ranks; by default as many as fit in `chunk_rows`' budget.

    Raises:
        ValueError: a shape that does not fit, `chunk` < 1, or `top` outside 0..vocab.
        IndexError: a target outside the vocabulary.
    """
    check_head_shapes("vocab_parallel_log_probs", hidden, weight, targets)
    widest = -(-vocab // ranks.size)  # slices differ by a row, but all ranks must cut the same chunks
    rows = chunk_rows(widest, hidden.dtype, hidden.device) if chunk is None else chunk
    part = RankSlice(start, vocab, ranks, sums_input_grad)
    return slice_log_probs(hidden, weight, targets, Request(part, entropy, top, rows, IGNORE_INDEX))
