"""Rendering of conversations by the tokenizer's chat template, with a clock that stands still."""

from __future__ import annotations

import datetime
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from femto_sft.conversation import Problem, Turn
from femto_sft.spans import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""Errors that a template's code raises for turns it does not support."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same pattern as in transformers
_CLOCK = "strftime_now"  # the function by which transformers' templates ask for the time


@attrs.frozen
class Rendered:
    """The text of a conversation."""

    text: str
    marks: tuple[Span, ...]
    """Places in the text [characters] of its {% generation %} blocks, in order."""


class Template:
    """The chat template of a tokenizer. Its clock shows the beginning of one day."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: datetime.date) -> None:
        self._tokenizer, self._arguments_as_text = tokenizer, False
        self._day = _clock(day) if is_dated(tokenizer) else ""
        self._arguments_as_text = self._wants_text()

    @property
    def source(self) -> str:
        """The Jinja text of the template, or of all templates that the tokenizer has."""
        return template_text(self._tokenizer)

    @property
    def marked(self) -> bool:
        """Whether the template for conversations without tools has {% generation %} marks."""
        return _MARK.search(self._tokenizer.get_chat_template()) is not None

    def render(self, turns: Sequence[Turn], tools: Sequence[Any] | None = None, *, prompt: bool = False) -> Rendered:
        """Return `turns` as text, with BOS if the template writes it; `prompt` adds the generation prompt.

        Raises one of `REFUSALS` where the template does not support the turns.
        """
        template = self._tokenizer.get_chat_template(tools=list(tools) if tools else None)
        marked = _MARK.search(template) is not None
        given = [_with_text(turn) if self._arguments_as_text else dict(turn) for turn in turns]
        special: Mapping[str, Any] = self._tokenizer.special_tokens_map
        found: Any = render_jinja_template(
            conversations=[given],
            tools=list(tools) if tools else None,
            chat_template=self._day + template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **special,
        )
        texts, marks = found
        return Rendered(str(texts[0]), tuple(marks[0]) if marked else ())

    def _wants_text(self) -> bool:
        """Whether the template takes the arguments of a tool call as JSON text only."""
        function = {"name": "a", "arguments": {"a": "b"}}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }
        turns = ({"role": "user", "content": "a"}, call)
        try:
            self.render(turns)
        except REFUSALS:
            try:
                self.render([_with_text(turn) for turn in turns])
            except REFUSALS:
                return False
            return True
        return False


def refused(error: Exception) -> Problem:
    """Return the problem with a conversation for which the template raised `error`."""
    return Problem(f"the chat template cannot render it ({' '.join(str(error).split()) or type(error).__name__})")


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja text of a tokenizer's template; of several templates, all texts."""
    template: Any = tokenizer.chat_template
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")


def is_dated(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's template may write the date."""
    return _CLOCK in template_text(tokenizer)


def _clock(day: datetime.date) -> str:
    """Return Jinja text that makes the templates' clock show `day`; it writes nothing.

    transformers passes no functions on to templates, so the clock is a macro that replaces strftime's directives.
    """
    midnight = datetime.datetime.combine(day, datetime.time())
    directives = ["%" + flag + letter for letter in string.ascii_letters for flag in ("", "-")]
    known = {code: text for code in directives if not (text := midnight.strftime(code)).startswith("%")}
    # The expression at the end keeps a line break at the beginning of the template.
    return (
        "{% macro " + _CLOCK + "(format) %}{% set clock = namespace(text=format) %}"
        "{% for code, text in " + json.dumps(known) + ".items() %}"
        "{% set clock.text = clock.text | replace(code, text) %}{% endfor %}{{ clock.text }}{% endmacro %}{{ '' }}"
    )


def _with_text(turn: Turn) -> dict[str, Any]:
    """Return `turn` with the arguments of its tool calls as JSON text."""
    if "tool_calls" not in turn:
        return dict(turn)
    calls = []
    for call in turn["tool_calls"]:
        inner = call.get("function", call)
        if isinstance(inner.get("arguments"), Mapping):
            inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": inner} if "function" in call else inner)
    return {**turn, "tool_calls": calls}
