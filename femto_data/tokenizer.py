"""Tokenizers: loaded by name, trained on a sample of the documents, and compared by a fingerprint."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, TokenizersBackend

from femto_core.errors import UserError
from femto_data.documents import TextPiece
from femto_data.limits import within_limits
from femto_ops.hugging_face import one_line

EOS = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and EOS
LARGEST_VOCABULARY = 2**24  # far above the largest published, about a million
_SAMPLE = 4 * 2**20  # characters to train a tokenizer on: enough for a small vocabulary, about a second of work
_SEGMENT = 2**16  # characters of a document that are sampled together
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""The files of a saved tokenizer that the fingerprint depends on."""
_HUB_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"
_HUB_PATIENCE_S = 5.0
_RULES = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")
_AROUND = ("bos_token", "eos_token", "cls_token", "sep_token")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or Hugging Face name.

    Raises UserError where it cannot be loaded or has no EOS, which ends every document.
    """
    tokenizer = read_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {name} has no EOS token to end documents with; set its eos_token and save it again")
    return tokenizer


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or Hugging Face name, with or without EOS. Code in its files is never run.

    Raises UserError, with the file where one is at fault: damaged files, code of its own, an id that no model has,
    loading that does not end, and a name that is no directory while the Hugging Face hub is out of reach.
    """
    folder = Path(name).expanduser()
    options: dict[str, Any] = {"trust_remote_code": False}
    if folder.is_dir():
        name, options["local_files_only"] = str(folder), True
    else:
        options["local_files_only"] = not _on_the_hub(name, folder)
    try:
        tokenizer: PreTrainedTokenizerBase = within_limits(
            lambda: _class_of(folder).from_pretrained(name, **options), f"loading tokenizer {name}"
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(_why(name, folder, error)) from error
    if (size := vocabulary_size(tokenizer)) > LARGEST_VOCABULARY:
        raise UserError(
            f"tokenizer {name} gives a token the id {size - 1}, but ids must lie below {LARGEST_VOCABULARY}; correct "
            f"it in tokenizer.json"
        )
    return tokenizer


def _class_of(directory: Path) -> Any:
    """Return the class that reads a tokenizer: as its own file says, where that holds the whole tokenizer.

    AutoTokenizer prefers the class of the model beside it, and builds its rules anew (Qwen2's normalise accents).
    """
    try:
        said = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["tokenizer_class"]
    except (OSError, ValueError, LookupError, TypeError):
        return AutoTokenizer
    whole = said == TokenizersBackend.__name__ and (directory / "tokenizer.json").is_file()
    return TokenizersBackend if whole else AutoTokenizer


def _on_the_hub(name: str, folder: Path) -> bool:
    """Whether the hub has the tokenizer `name`; False where it is out of reach but a copy is in the cache.

    Asked once, before transformers asks for every file five times. Raises UserError where there is neither.
    """
    if folder.exists():
        raise UserError(f"tokenizer {name} is a file; give the directory that it stands in")
    if not re.fullmatch(_HUB_NAME, name):
        raise UserError(f"tokenizer {name} does not exist; check its spelling")
    try:
        huggingface_hub.model_info(name, timeout=_HUB_PATIENCE_S)
    except Exception as error:
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "tokenizer_config.json"), str):
            raise UserError(
                f"tokenizer {name} is no directory, and the Hugging Face hub cannot be reached or has none of that "
                f"name ({one_line(error)}); check the spelling and the network"
            ) from error
        return False
    return True


def _why(name: str, folder: Path, error: Exception) -> str:
    """Return the sentence for a tokenizer that transformers does not load: the file at fault, if one shows."""
    for file in sorted(folder.glob("*.json")):
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as damage:
            return f"{file} is damaged, or cannot be read ({one_line(damage)}); copy the tokenizer again"
        if not isinstance(values, dict):
            return f"{file} is damaged: it holds no JSON object; copy the tokenizer again"
        if "auto_map" in values and "trust_remote_code" in str(error):
            return (
                f"{file}: auto_map asks for code from the directory, which femto never runs; save the tokenizer with "
                "a class of transformers"
            )
    if folder.is_dir() and not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        return f"{folder} holds no tokenizer (tokenizer.json); give a directory that save_pretrained wrote"
    if "trust_remote_code" in str(error):
        return f"tokenizer {name} asks for code of its own, which femto never runs; give another"
    return f"tokenizer {name} cannot be loaded ({one_line(error)}); give a directory that save_pretrained wrote"


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write `tokenizer` to `directory`. Raises OSError where that fails, whatever the library raises."""
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        raise OSError(str(error)) from error  # on a full disk the Rust library raises a bare Exception


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hexadecimal characters, equal for two tokenizers if and only if they have the same rules for ids.

    The rules are the model with its merges, added tokens, normalizer, pre-tokenizer and post-processor (the
    vocabulary, for a tokenizer without a backend in Rust), and the special tokens that are put around a text. Decoder,
    directory, chat template, padding (with its token) and truncation decide no ids of a text and do not count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        description: dict[str, Any] = json.loads(backend.to_str())
        rules = {name: description.get(name) for name in _RULES}
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    around = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in _AROUND}
    return hashlib.sha256(json.dumps([rules, around], sort_keys=True).encode()).hexdigest()[:16]


def saved_tokenizer_fingerprint(directory: Path) -> str | None:
    """Return the fingerprint of the tokenizer saved in `directory`, or None where none is saved there.

    Raises UserError for a tokenizer that cannot be loaded.
    """
    if not (directory / "tokenizer_config.json").is_file():
        return None
    return tokenizer_fingerprint(read_tokenizer(str(directory)))


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one; with gaps in the vocabulary this is more than the number of tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def train_tokenizer(sample: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE trained on `sample`. Decoding restores any text; equal samples give equal merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # No sample has more merges than characters; the library reserves memory for as many tokens as it is asked for.
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, _SAMPLE), special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(iter(sample), trainer)
    # With clean-up, decoding would drop spaces before punctuation.
    wrap: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast  # its own __init__ is not typed
    return wrap(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def draw_sample(pieces: Iterable[TextPiece]) -> list[str]:
    """Return about 4 Mi characters of `pieces`, or all if there are fewer: evenly drawn segments in order, in one pass.

    Each segment of a document gets a pseudo-random rank from a hash of its place; segments of the lowest rank are kept.
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


def _segments(pieces: Iterable[TextPiece]) -> Iterator[tuple[str, str]]:
    """Yield (place, text) for each segment of each document."""
    number = 0
    for piece in pieces:
        number = 0 if piece.first else number
        for start in range(0, len(piece.text), _SEGMENT):
            yield f"{piece.document}:{number}", piece.text[start : start + _SEGMENT]
            number += 1
