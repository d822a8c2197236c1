"""How a model ends and samples its answers: `generation_config.json`, as from_pretrained reads it.

The file of the model that training started from is kept. What ends a text is what ended one there, and what the data
taught the model to end with: a file of this name beside the data's tokenizer says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from femto_core.errors import UserError
from femto_core.sections import ModelSection
from femto_ops.hugging_face import ModelError, read_json

GENERATION = "generation_config.json"
EOS = "eos_token_id"
SPECIAL = ("bos", "eos", "pad")


def source_generation(model: ModelSection) -> dict[str, Any]:
    """Return the generation config of the model whose weights the run starts from; empty where it has none.

    Raises `UserError` where the file is damaged.
    """
    file = Path(model.path) / GENERATION
    if not model.path or model.weights != "load" or not file.exists():
        return {}
    try:
        values = read_json(file)
    except ModelError as error:
        raise UserError(str(error)) from None
    if any(type(number) is not int for number in _listed(values.get(EOS))):
        raise UserError(f"{file}: {EOS} = {values[EOS]!r} must be a token id, or a list of them")
    return values


def write_generation(folder: Path, config: PretrainedConfig, source: dict[str, Any]) -> None:
    """Write the generation config of a model into `folder`, where its tokenizer is, and maybe what the data ended with.

    `source` is the generation config of the model that training started from.
    """
    file = folder / GENERATION
    trained = _listed(read_json(file).get(EOS)) if file.exists() else []
    own = {f"{kind}_token_id": getattr(config, f"{kind}_token_id", None) for kind in SPECIAL}
    values = {**_special_tokens(folder), **{key: value for key, value in own.items() if value is not None}, **source}
    if ends := list(dict.fromkeys([*_listed(values.get(EOS)), *trained])):
        values[EOS] = ends[0] if len(ends) == 1 else ends
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _listed(ids: Any) -> list[Any]:
    return [] if ids is None else [*ids] if isinstance(ids, list | tuple) else [ids]


def _special_tokens(folder: Path) -> dict[str, int]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` as far as the tokenizer's files name those tokens."""
    try:
        names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    found = {}
    for kind in SPECIAL:
        name = names.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if name in ids:
            found[f"{kind}_token_id"] = ids[name]
    return found
