"""The k largest of many values, in an order that does not depend on the device or on how the values are divided.

torch.topk may choose any of several equal values; here the value with the smaller id comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row of `values` [c, v] in descending order [c, k], and their columns [c, k].

    torch.topk is asked twice: for the values, then for the first columns that equal the k-th value.
    """
    c, v = values.shape
    found, ids = torch.topk(values, k, dim=1)
    last = found[:, -1:]
    columns = torch.arange(v, dtype=torch.int32, device=values.device).expand(c, v)
    ties = columns.where(values == last, v).topk(k, dim=1, largest=False).values.long()  # ascending
    above = (found != last).sum(1, keepdim=True)
    turn = torch.arange(k, device=values.device) - above  # the n-th place with the k-th value takes the n-th column
    return first_of(found, ids.where(found != last, ties.gather(1, turn.clamp_min(0))), k)


def first_of(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first k of `values` [c, m] and of their `ids` [c, m], by descending value, then by ascending id."""
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values[:, :k], ids.gather(1, order)[:, :k]
