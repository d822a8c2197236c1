"""The tokenizer of a run and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from femto_core.errors import UserError
from femto_data.tokenizer import load_tokenizer as load_any_tokenizer
from femto_data.tokenizer import saved_tokenizer_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = "none"
"""Value of sft.template for plain text without a template."""


def load_tokenizer(name: str, template: str, model: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer `name`, or the model's if `name` is empty, with `template` as its chat template.

    Raises `UserError` if it cannot be loaded, differs from the model's, or has no EOS or no template.
    """
    tokenizer = _load(name or model)
    if name and model:
        ours, theirs = tokenizer_fingerprint(tokenizer), saved_tokenizer_fingerprint(Path(model))
        if theirs not in (None, ours):
            raise UserError(
                f"sft.tokenizer = {name!r} ({ours}) is another tokenizer than the model's in {model} ({theirs}); "
                "leave sft.tokenizer empty"
            )
    if template not in ("", PLAIN):
        tokenizer.chat_template = read_template(template)
    if template != PLAIN and not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {name or model} has no chat template; give one with sft.template (a Jinja file), or none "
            "for prompts and completions as plain text"
        )
    named = tokenizer.chat_template
    if template != PLAIN and isinstance(named, dict) and "default" not in named:
        raise UserError(
            f"the tokenizer {name or model} has the chat templates {', '.join(named)}, and none is the default; give "
            "one with sft.template (a Jinja file)"
        )
    return tokenizer


def read_template(template: str) -> str:
    """Return the text of a chat template. `template` is that text, or its file."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"sft.template = {template!r} is neither Jinja text nor a file that can be read: {reason}"
        ) from None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all special tokens, including added ones."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return frozenset({*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)})


def _load(name: str) -> PreTrainedTokenizerBase:
    tokenizer = load_any_tokenizer(name)
    if not tokenizer.is_fast:
        raise UserError(f"the tokenizer {name} has no fast version, which is needed to find the assistant's tokens")
    return tokenizer
