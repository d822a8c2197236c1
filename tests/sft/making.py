"""Helpers for the tests of fine-tuning: a tokenizer with end-of-turn tokens, templates, files, encoded text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from femto_core.errors import UserError
from femto_data.tokenizer import train_tokenizer
from femto_sft.cache import PackedRows, packed_rows, report
from femto_sft.conversation import Problem
from femto_sft.encoder import make_encoder
from femto_sft.formats import FORMATS, read_row, recognise
from femto_sft.rows import ConversationRows
from femto_sft.section import SFTSection
from femto_sft.tokens import Tokens

Said = Sequence[tuple[str, str]]

_HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN_CHATML = _HEAD + "{{ m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}" + _PROMPT
_MARKS = "{% if m['role'] == 'assistant' %}{% generation %}%s{% endgeneration %}%s{% else %}"
_OTHER = "{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"


def _marked(inside: str, behind: str) -> str:
    marks = _MARKS.replace("%s", inside, 1).replace("%s", behind, 1)
    return _HEAD + marks + _OTHER + _PROMPT


MARKED = _marked("{{ m['content'] }}<|im_end|>", "")
MARKED_WITHOUT_END = _marked("{{ m['content'] }}", "<|im_end|>")
MARKED_AROUND_NOTHING = _marked("", "{{ m['content'] }}<|im_end|>")
WITH_BOS = "{{ bos_token }}" + PLAIN_CHATML
OPEN = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
"""A template that ends no turn with a special token."""
ENDING_IN_A_SPACE = OPEN.replace(":\n", ": ")
"""A template whose generation prompt ends with a space, which the answer " yes" merges into its first token."""
THINKING = (
    _HEAD
    + "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    + "{{ m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}"
    + _PROMPT
)
"""A template that renders the last answer differently from earlier answers."""
COUNTING = "{{ messages | length }}" + PLAIN_CHATML
"""A template whose beginning changes with every turn."""
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN_CHATML
)
NO_TOOLS = (
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}" + _PROMPT
)
"""A template that shows no tools, and of roles these three only."""
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments ARGUMENTS }}}</tool_call>{% endfor %}'
)
_DESCRIBED = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
CALLING = _DESCRIBED + PLAIN_CHATML.replace("<|im_end|>", _CALLS.replace("ARGUMENTS", "| tojson") + "<|im_end|>")
"""A template that shows tools, and calls with their arguments as JSON."""
CALLING_WITH_TEXT = CALLING.replace("c.function.arguments | tojson", "'' + c.function.arguments")
"""The same, for arguments that are JSON text."""
REASONING = (
    "{% set last = namespace(place=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.place = loop.index0 %}{% endif %}{% endfor %}"
    + _HEAD
    + "{% if m.reasoning_content and loop.index0 > last.place %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    + "{{ m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}"
    + _PROMPT
)
"""A template that shows reasoning behind the last question only."""
QWEN_LIKE = (
    "{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\n' + m.content + END }}"
    "{%- else %}{{- '<|im_start|>assistant\n' }}{%- generation %}{{- m.content + END }}{%- endgeneration %}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""A template whose generation block ends with the end of turn, as END, which tests replace."""
DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + PLAIN_CHATML
SAMPLE = ["say yes", "yes", "What does textwrap.dedent do?", "Remove any common leading whitespace from every line."]


def make_tokenizer(template: str | None = PLAIN_CHATML, *, adds_bos: bool = False) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer in which <|im_end|> ends a turn, EOS ends text, and EOS is padding too."""
    tokenizer = train_tokenizer(SAMPLE * 4, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": "<|bos|>"})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        backend: Any = tokenizer.backend_tokenizer
        backend.post_processor = TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)])
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = PLAIN_CHATML) -> str:
    make_tokenizer(template).save_pretrained(folder)
    return str(folder)


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def talk(number: int, words: int = 3) -> dict[str, Any]:
    return said(("user", f"say {number}"), ("assistant", " ".join([str(number)] * words)))


def encode(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **settings: Any) -> Tokens | Problem:
    known = recognise(row)
    assert known is not None
    return make_encoder(tokenizer, SFTSection(**settings)).encode([read_row(row, FORMATS[known.name])])[0]


def encoded(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **settings: Any) -> Tokens:
    tokens = encode(tokenizer, row, **settings)
    assert isinstance(tokens, Tokens), tokens
    return tokens


def trained_text(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> list[str]:
    """The text of each span of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(tokens.ids.tolist(), tokens.trained.tolist(), strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [str(tokenizer.decode(run)) for run in runs]


def write_lines(file: Path, *lines: bytes | str | dict[str, Any]) -> Path:
    parts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    file.write_bytes(b"\n".join(part.encode() if isinstance(part, str) else part for part in parts) + b"\n")
    return file


def section(folder: Path, *paths: Path | str, **settings: Any) -> SFTSection:
    """Settings for files in `folder`, which also has the tokenizer and the cache."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists() and "tokenizer" not in settings:
        save_tokenizer(tokenizer)
    defaults = {"tokenizer": str(tokenizer), "cache": str(folder / "cache"), "held_out": 0.0}
    return SFTSection(path=tuple(map(str, paths)), **{**defaults, **settings})


def packed(folder: Path, *paths: Path | str, seq_len: int = 64, **settings: Any) -> PackedRows:
    return packed_rows(section(folder, *paths, **settings), seq_len=seq_len, model="")


def rows_of(folder: Path, *paths: Path | str, seq_len: int = 64, **settings: Any) -> ConversationRows:
    return ConversationRows(packed(folder, *paths, seq_len=seq_len, **settings).directory, "train")


def log_of(rows: ConversationRows, *paths: Path | str) -> str:
    """The log lines of a run about the rows of `paths`."""
    return "\n".join(report(PackedRows(rows.directory, tuple(map(str, paths)))))


def refusal(folder: Path, *paths: Path | str, seq_len: int = 64, **settings: Any) -> str:
    """The error sentence of a refused run, which must leave nothing in the cache."""
    with pytest.raises(UserError) as caught:
        rows_of(folder, *paths, seq_len=seq_len, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    assert not [file for file in (folder / "cache").glob("*") if file.suffix != ".lock"]
    return text


def texts(rows: ConversationRows) -> list[str]:
    """The text of every document of every row, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(rows.tokenizer_path)
    found = []
    for i in range(len(rows)):
        row, start = rows[i], 0
        for length in row.lengths[: len(rows.documents(i))]:
            found.append(str(tokenizer.decode(row.ids[start : start + length].tolist())))
            start += length
    return found
