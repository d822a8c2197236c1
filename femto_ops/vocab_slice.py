"""The arithmetic of token statistics on a slice of the vocabulary, for a chunk of rows at a time.

The slice may be the whole vocabulary. With several holders, each with its own slice, a few numbers per row travel; no
holder sees a whole row of logits.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from femto_ops.cross_entropy import wide
from femto_ops.top_k import first_of, largest


@attrs.frozen
class VocabSlice:
    """The rows of the head's weight that this process holds, `start` and after; here the whole vocabulary.

    A subclass that holds a part of the vocabulary overrides both methods to talk to the other holders.
    """

    start: int
    vocab: int
    """Rows of the whole vocabulary."""

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the `numbers` [...] of all p holders, as [p, ...]."""
        return numbers.unsqueeze(0)

    def sum_input_grad(self, dhidden: Tensor) -> Tensor:
        """Return the sum over all holders of their partial gradients `dhidden`; may work in place."""
        return dhidden


@attrs.frozen
class Request:
    """What is asked of `slice_log_probs`, beside its tensors."""

    part: VocabSlice
    entropy: bool
    top: int
    chunk: int
    """Rows of logits alive at a time; equal on all holders of the vocabulary."""
    ignore_index: int


class Statistics:
    """The statistics of the rows that are not ignored, filled in chunk by chunk."""

    def __init__(self, n: int, hidden: Tensor, request: Request) -> None:
        self._request, top = request, request.top
        dtype, device = wide(hidden.dtype), hidden.device
        self.log_probs, self.normaliser = (torch.empty(n, dtype=dtype, device=device) for _ in range(2))
        self.entropy = torch.empty(n, dtype=dtype, device=device) if request.entropy else None
        self.top_log_probs = torch.empty(n, top, dtype=dtype, device=device) if top else None
        self.top_ids = torch.empty(n, top, dtype=torch.int64, device=device) if top else None

    def fill(self, place: slice, logits: Tensor, targets: Tensor) -> None:
        """Fill in the rows at `place` from this process's part of their `logits` [c, rows held here].

        Each holder sends, per row, its largest logit m, the sum of exp(logit - m), the target's logit, the sum of
        (logit - m) exp(logit - m) for the entropy, and its k best candidates.
        """
        request = self._request
        numbers = _local_numbers(logits.to(self.log_probs.dtype), targets, request)  # [4 + 2k, c]
        everyone = request.part.gather(numbers)  # [p, 4 + 2k, c]
        highest = everyone[:, 0].amax(0)  # [c]
        shift = (everyone[:, 0] - highest).clamp_min(torch.finfo(numbers.dtype).min)  # -inf where a holder has no rows
        scale = shift.exp()
        total = (everyone[:, 1] * scale).sum(0)
        log_total = total.log()
        self.normaliser[place] = highest + log_total
        self.log_probs[place] = everyone[:, 2].sum(0) - highest - log_total
        if self.entropy is not None:
            weighted = ((everyone[:, 3] + shift * everyone[:, 1]) * scale).sum(0)
            self.entropy[place] = log_total - weighted / total
        if self.top_log_probs is not None and self.top_ids is not None:
            values, ids = everyone[:, 4:].chunk(2, dim=1)  # [p, k, c] each
            values, ids = (t.permute(2, 0, 1).flatten(1) for t in (values, ids))  # [c, p * k] each
            values, self.top_ids[place] = first_of(values, ids.long(), request.top)
            self.top_log_probs[place] = values - highest.unsqueeze(1) - log_total.unsqueeze(1)


@attrs.frozen
class Saved:
    """What forward saved for each of c rows."""

    targets: Tensor
    """[c]."""
    normaliser: Tensor
    """[c]: the logarithm of the sum of exp(logits)."""
    entropy: Tensor | None
    top_ids: Tensor | None

    def at(self, rows: slice) -> Saved:
        """Return what was saved for some of the rows."""
        top_ids = None if self.top_ids is None else self.top_ids[rows]
        entropy = None if self.entropy is None else self.entropy[rows]
        return Saved(self.targets[rows], self.normaliser[rows], entropy, top_ids)


@attrs.frozen
class OutputGrads:
    """The gradients of the statistics; None where backward brings none."""

    log_probs: Tensor | None
    entropy: Tensor | None
    top_log_probs: Tensor | None

    def at(self, rows: slice) -> OutputGrads:
        """Return the gradients of some of the rows."""
        grads = (self.log_probs, self.entropy, self.top_log_probs)
        return OutputGrads(*(None if grad is None else grad[rows] for grad in grads))

    def to_logits(self, logits: Tensor, saved: Saved, start: int) -> Tensor:
        """Return the gradient of `logits` [c, rows held here], whose columns are tokens `start` and after.

        May overwrite `logits`.

        With p = softmax, H the entropy and g the gradients of the statistics:
        dlogits = g_target onehot(target) + sum_k g_k onehot(k) - (g_target + sum_k g_k) p - g_H p (log p + H).
        """
        log_p = logits.to(saved.normaliser.dtype).sub_(saved.normaliser.unsqueeze(1))
        onehots = [(saved.targets.unsqueeze(1), None if self.log_probs is None else self.log_probs.unsqueeze(1))]
        if saved.top_ids is not None:
            onehots.append((saved.top_ids, self.top_log_probs))
        total = torch.zeros_like(saved.normaliser).unsqueeze(1)  # [c, 1]: g_target + sum_k g_k
        for _, grad in onehots:
            if grad is not None:
                total += grad.sum(1, keepdim=True)
        if self.entropy is not None and saved.entropy is not None:
            pull = log_p.exp()
            log_p.add_(saved.entropy.unsqueeze(1)).mul_(self.entropy.unsqueeze(1)).add_(total)
            pull.mul_(log_p).neg_()
        else:
            pull = log_p.exp_().mul_(-total)
        for ids, grad in onehots:
            if grad is not None and pull.shape[1]:
                column, is_here = columns_of(ids, start, pull.shape[1])
                pull.scatter_add_(1, column, grad.where(is_here, 0))
        return pull


def _local_numbers(logits: Tensor, targets: Tensor, request: Request) -> Tensor:
    """Return what one holder sends of its `logits` [c, rows held here]: see `Statistics.fill`. May change `logits`."""
    (c, held), k = logits.shape, request.top
    numbers = logits.new_zeros(4 + 2 * k, c)
    numbers[0], numbers[4 : 4 + k] = -torch.inf, -torch.inf
    numbers[4 + k :] = request.part.vocab  # behind every real candidate
    if not held:
        return numbers
    column, is_here = columns_of(targets.unsqueeze(1), request.part.start, held)
    numbers[2] = logits.gather(1, column).where(is_here, 0).squeeze(1)
    if k:
        values, ids = largest(logits, min(k, held))
        numbers[4 : 4 + values.shape[1]] = values.t()
        numbers[4 + k : 4 + k + ids.shape[1]] = (ids + request.part.start).t()  # fp32 holds integers up to 2^24
    numbers[0] = logits.amax(1)
    logits.sub_(numbers[0].unsqueeze(1))
    if request.entropy:
        exp = logits.exp()
        numbers[1] = exp.sum(1)
        numbers[3] = exp.mul_(logits).sum(1)
    else:
        numbers[1] = logits.exp_().sum(1)
    return numbers


def columns_of(ids: Tensor, start: int, held: int) -> tuple[Tensor, Tensor]:
    """Return the columns of `ids` among `held` columns from `start` on, 0 for ids outside, and which are inside."""
    columns = ids - start
    is_here = (columns >= 0) & (columns < held)
    return columns.where(is_here, 0), is_here
