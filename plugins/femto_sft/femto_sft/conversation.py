"""A conversation, as it is passed to the chat template, and the reason why a row has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

Turn = Mapping[str, Any]
"""Has at least `role` and, unless the turn only calls tools, `content`."""


@attrs.frozen
class Conversation:
    """The turns of a conversation, in order."""

    turns: tuple[Turn, ...]
    context: int = 0
    """Number of turns at the start that are the prompt and never trained, the assistant's included."""
    tools: tuple[Any, ...] | None = None
    """Tool descriptions that are passed to the template."""
    left_out: frozenset[int] = frozenset()
    """Indices of the turns that the data says not to train."""

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's turns that are not part of the prompt."""
        return [i for i, turn in enumerate(self.turns) if turn["role"] == "assistant" and i >= self.context]


@attrs.frozen
class Problem:
    """Why a row cannot be used: the rest of a sentence that begins with the row's file and line."""

    reason: str


class NoConversation(ValueError):  # noqa: N818 - reads as the reason it states
    """A row is not in its file's format. The error's text is a `Problem`'s reason."""
