"""A conversation, as the chat template is given it; and the reason why something is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

Turn = Mapping[str, Any]
"""At least `role` and, but for turns that only call tools, `content`."""


@attrs.frozen
class Conversation:
    """Turns in order."""

    turns: tuple[Turn, ...]
    context: int = 0
    """So many turns at the start are never trained, whoever speaks: they are the prompt."""
    tools: tuple[Any, ...] | None = None
    """What the template is told about tools."""

    @property
    def answers(self) -> list[int]:
        """Places of the assistant's turns that may be trained."""
        return [i for i, turn in enumerate(self.turns) if turn["role"] == "assistant" and i >= self.context]


@attrs.frozen
class Problem:
    """Why a row cannot be used: the rest of a sentence that begins with its file and line."""

    reason: str


class NoConversation(ValueError):  # noqa: N818 - reads as the reason it states
    """A row that is not in its file's format; the text is a `Problem`'s reason."""
