"""An encoder within limits: the chat template and the tokenizer's rules are somebody else's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from femto_core.errors import UserError
from femto_data.limits import bounded_memory, each_within_limits, within_limits
from femto_sft.conversation import Conversation, Problem, Turn
from femto_sft.section import SFTSection
from femto_sft.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from femto_sft.encoder import Encoder

_TOGETHER = 2**18  # characters that are encoded between two looks at the clock
_SPEED = 5e5  # characters rendered and tokenised a second, at the slowest
_PROBE: tuple[Turn, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class Limited:
    """Encodes as the encoder that `make` returns, within limits of processor time and memory.

    Rendering the probe, and the first conversation, may not allocate more than the limit at once. Later ones are only
    watched: their tokens are made in Rust, which ends the process where it cannot allocate.
    """

    def __init__(self, make: Callable[[], Encoder], tokenizer: PreTrainedTokenizerBase, section: SFTSection) -> None:
        given = section.template[:60]
        source = f"sft.template = {given!r}" if given else f"the chat template of tokenizer {tokenizer.name_or_path}"
        self._what, self._tokenizer = f"encoding conversations with {source}", tokenizer
        self._templated = bool(tokenizer.chat_template) and given != "none"
        self._render(Conversation(_PROBE))
        self._encoder = within_limits(make, self._what)
        self._rendered_one = False
        self.how = self._encoder.how

    @property
    def notes(self) -> Mapping[str, int]:
        return self._encoder.notes

    @property
    def unread(self) -> Mapping[str, int]:
        return self._encoder.unread

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | Problem]:
        if conversations and not self._rendered_one:
            self._render(conversations[0])
            self._rendered_one = True
        groups = list(_groups(conversations))
        most = max((sum(map(_work, group)) for group in groups), default=0)
        encoded = each_within_limits(map(self._encoder.encode, groups), self._what, most / _SPEED)
        return [tokens for group in encoded for tokens in group]

    def _render(self, conversation: Conversation) -> None:
        """Render a conversation within limits, and forget it; the encoder tells about other errors of the template."""

        def render() -> None:
            try:
                self._tokenizer.apply_chat_template(
                    [dict(turn) for turn in conversation.turns], tools=list(conversation.tools or ()), tokenize=False
                )
            except MemoryError:
                raise UserError(f"{self._what} takes more memory than a template needs") from None
            except Exception:  # noqa: BLE001 - a template need not know this conversation
                return

        if self._templated:
            with bounded_memory():
                within_limits(render, self._what)


def _groups(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    group: list[Conversation] = []
    size = 0
    for conversation in conversations:
        group.append(conversation)
        size += _characters(conversation)
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _work(conversation: Conversation) -> int:
    """Return the characters that are rendered: the conversation, and its beginning twice for each answer."""
    return _characters(conversation) * (1 + 2 * len(conversation.answers))


def _characters(conversation: Conversation) -> int:
    shown: list[Any] = [turn.get("content", "") for turn in conversation.turns]
    return sum(len(text) if isinstance(text, str) else len(str(text)) for text in [*shown, *(conversation.tools or ())])
