"""Whether from_pretrained reads the tokenizer of an export as femto wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from femto_data.tokenizer import load_tokenizer, tokenizer_fingerprint

SAMPLE = (
    "The quick brown fox doesn't jump; it's 12345.67 (or 1e-9)!",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m \u212b \ufb01 caf\u00e9",
    "  def f(x):\n\t\treturn x  \n\n\n",
    "\u6f22\u5b57\u304b\u306a \ud55c\uae00 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600",
)
"""Texts on which tokenizers differ: contractions, digits, white space, scripts, and accents that are characters."""


def other_ids(folder: Path) -> str:
    """Return a sentence if AutoTokenizer gives other ids for `folder` than the tokenizer that is saved there.

    transformers chooses another class for some models. The two are compared on `SAMPLE` where their rules differ.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return ""
    load: Any = AutoTokenizer.from_pretrained
    try:
        own, theirs = load_tokenizer(str(folder)), load(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - a tokenizer's class may raise anything
        return f"{folder}: AutoTokenizer cannot load the tokenizer ({' '.join(str(error).split())})"
    if tokenizer_fingerprint(own) == tokenizer_fingerprint(theirs):
        return ""
    for text in SAMPLE:
        mine, found = (one(text, add_special_tokens=False)["input_ids"] for one in (own, theirs))
        if mine != found:
            return (
                f"{folder}: AutoTokenizer takes {type(theirs).__name__} for this model, which gives other ids than "
                f"those of training ({len(found)} tokens for {text!r}, {len(mine)} in training); load it with "
                f"{type(own).__name__}.from_pretrained, as femto does"
            )
    return ""
