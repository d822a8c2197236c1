"""What autograd is doing."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Tell whether autograd is running a backward in this thread, a recomputation within it included."""
    return bool(torch._C._current_graph_task_id() != -1)
