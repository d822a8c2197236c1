"""The settings of plugin sft; in their own file, so that --help loads nothing heavy."""

from __future__ import annotations

from typing import Literal

import attrs

from femto_core.sections import share


@attrs.frozen(kw_only=True)
class SFTSection:
    """Conversations to fine-tune on, and what of them is trained."""

    path: tuple[str, ...] = ()
    """Files (.jsonl, .ndjson, .json, each also .gz and .zst; .parquet), directories of such files or of a saved
    dataset, and Hugging Face datasets (NAME or NAME:CONFIG), read in this order."""
    split: str = "train"
    """Which split of Hugging Face datasets, saved ones too, is read."""
    format: Literal["auto", "messages", "conversations", "instruction", "prompt"] = "auto"
    """Keys of a row: messages (role, content), conversations (from, value), instruction (input, output), prompt
    (completion); auto: recognised by them, for each file by its first row."""
    tokenizer: str = ""
    """Directory or Hugging Face name of the tokenizer; empty: the one beside the model at model.path."""
    template: str = ""
    """Chat template: a file, or the Jinja text itself; empty: the tokenizer's own; none: prompt, completion and EOS as
    plain text."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What is learnt: every assistant turn with its end of turn, only the last one, or all text."""
    packing: Literal["ffd", "bfd", "pad"] = "ffd"
    """How conversations share rows: first-fit decreasing, best-fit decreasing, or one padded row each."""
    overlong: Literal["drop", "truncate", "split"] = "drop"
    """A conversation longer than data.seq_len: leave it out, cut it behind the last assistant turn that fits, or cut it
    into pieces of which each one starts without what went before."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """A line that is no conversation, or one that the template refuses or cannot be asked about: end with its file and
    line, or leave it out and count it."""
    held_out: float = attrs.field(default=0.02, validator=share)
    """Share of the conversations kept for evaluation, chosen by a hash of their tokens: copies stay on one side."""
    cache: str = "~/.cache/femto/sft"
    """Where packed rows are kept, under a digest of inputs, settings and tokenizer."""
