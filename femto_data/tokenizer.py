"""The tokenizer of a dataset: loaded by name, or trained on a sample of the documents themselves; told from others."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from femto_core.errors import UserError
from femto_data.documents import Piece

EOS = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and EOS
_SAMPLE = 4 * 2**20  # characters a tokenizer is trained on: enough for a small vocabulary, a second of work
_SEGMENT = 2**16  # characters that are chosen or not together


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or Hugging Face name; it must have an EOS, which ends every document."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserError(
            f"tokenizer {name} cannot be loaded ({' '.join(str(error).split())[:200]}); give a directory that "
            f"save_pretrained wrote, or a Hugging Face name while there is a network"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {name} has no EOS token to end documents with; set its eos_token and save it again")
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hexadecimal characters that change whenever the ids of some text would.

    They cover the backend's own description (model, merges, normaliser, added tokens), or the vocabulary where there is
    no such backend, and the special tokens. Directory, padding and truncation do not enter: they are a caller's state.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules: dict[str, Any] = json.loads(backend.to_str())
        for state in ("padding", "truncation"):
            rules.pop(state, None)
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([rules, special], sort_keys=True).encode()).hexdigest()[:16]


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return one more than the largest id, which gaps in the vocabulary make larger than the number of tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def train_tokenizer(sample: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE trained on `sample`: any text comes back exactly; equal samples give equal merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(iter(sample), trainer)
    # Clean-up would drop spaces before punctuation when decoding, and the text would not come back.
    wrap: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast  # its own __init__ carries no types
    return wrap(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def draw_sample(pieces: Iterable[Piece]) -> list[str]:
    """Return up to 4 Mi characters of `pieces` in order, or all there are: segments chosen evenly, in one pass.

    Each segment of a document gets a pseudo-random rank from its place, and those of lowest rank are kept.
    """
    kept: list[tuple[int, int, str]] = []  # a heap with the highest rank on top: (-rank, order, text)
    size = 0
    for order, (place, text) in enumerate(_segments(pieces)):
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        heapq.heappush(kept, (-int.from_bytes(digest, "big"), order, text))
        size += len(text)
        while size - len(kept[0][2]) >= _SAMPLE:
            size -= len(heapq.heappop(kept)[2])
    return [text for _, _, text in sorted(kept, key=lambda entry: entry[1])]


def _segments(pieces: Iterable[Piece]) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the segments of all documents."""
    number = 0
    for piece in pieces:
        number = 0 if piece.first else number
        for start in range(0, len(piece.text), _SEGMENT):
            yield f"{piece.document}:{number}", piece.text[start : start + _SEGMENT]
            number += 1
