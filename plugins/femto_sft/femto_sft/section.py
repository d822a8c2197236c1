"""The settings of plugin sft, in a file that --help can load quickly."""

from __future__ import annotations

import datetime
from typing import Literal

import attrs

from femto_core.sections import at_home, check, share


def _is_date(text: str) -> bool:
    try:
        return not text or bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


@attrs.frozen(kw_only=True)
class SFTSection:
    """Conversations to fine-tune on, and which of their tokens are trained."""

    path: tuple[str, ...] = attrs.field(default=(), converter=at_home)
    """Files (.jsonl, .ndjson, .json, each also .gz and .zst; .parquet), directories of such files or of a saved
    dataset, and Hugging Face datasets (NAME or NAME:CONFIG), read in this order."""
    split: str = "train"
    """Split to read of Hugging Face datasets, downloaded or saved."""
    format: Literal["auto", "messages", "conversations", "instruction", "prompt"] = "auto"
    """Keys of a row: messages (role, content), conversations (from, value), instruction (input, output), prompt
    (completion); auto: recognised for each file by the keys of its first row."""
    tokenizer: str = attrs.field(default="", converter=at_home)
    """Directory or Hugging Face name of the tokenizer; empty: the one beside the model at model.path."""
    template: str = ""
    """Chat template: a file, or the Jinja text itself; empty: the tokenizer's own; none: prompt, completion and EOS as
    plain text."""
    date: str = attrs.field(default="", validator=check(_is_date, "must be a date such as 2026-01-31"))
    """Date that a template with a clock writes, such as 2026-01-31; empty: the day on which the run began."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to train: every assistant turn with its end of turn, only the last assistant turn, or all text."""
    packing: Literal["ffd", "bfd", "pad"] = "ffd"
    """How conversations share rows: first-fit decreasing, best-fit decreasing, or one padded row each."""
    overlong: Literal["drop", "truncate", "split"] = "drop"
    """For a conversation longer than data.seq_len: leave it out, cut it after the last assistant turn that fits, or
    split it into pieces, which do not see each other."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """For a row that has no conversation, or one that the template cannot render: end with its file and line, or skip
    and count it."""
    held_out: float = attrs.field(default=0.02, validator=share)
    """Share of the conversations held out, chosen by a hash of their tokens; copies are in the same split."""
    cache: str = "~/.cache/femto/sft"
    """Where packed rows are kept, under a digest of inputs, settings and tokenizer."""


def day_of(section: SFTSection) -> datetime.date:
    """Return the day that the template's clock shows."""
    return datetime.date.fromisoformat(section.date) if section.date else datetime.datetime.now().date()


numbers = check(lambda v: v and min(v) >= 0, "must be one or more numbers from 0")


@attrs.frozen(kw_only=True)
class InspectOptions:
    """Show conversations token by token. Trained tokens are green and in [brackets], the others grey between bars."""

    show: tuple[int, ...] = attrs.field(default=(0, 1, 2), validator=numbers)
    """Numbers of the conversations to show, from 0 in the order of reading."""
