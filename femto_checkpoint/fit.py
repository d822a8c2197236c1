"""Whether a checkpoint fits a run, and what differs where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from femto_checkpoint.files import DTYPES, checksum_of
from femto_checkpoint.index import MASTER, Checkpoint
from femto_checkpoint.writer import MODEL
from femto_core.checkpoint import RunState
from femto_core.errors import UserError

WEIGHTS_ONLY = "to take over only its weights, set --checkpoint.weights-only"
NOT_COMPARED = {
    *("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache", "_attn_implementation"),
    *("initializer_range", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp", "chunk_size_feed_forward"),
}
"""Of a transformers config: says nothing of what the weights compute."""
HEADS = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
"""What may not differ even where only weights are taken over, and would not show in their shapes."""
TOKENIZER = "tokenizer.json"
TOKENS = ("model", "added_tokens", "normalizer", "pre_tokenizer")
"""What in that file decides the ids of a text."""


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return what `config` says of the model as plain JSON values."""
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_COMPARED}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def check_parameters(checkpoint: Checkpoint, state: RunState, everyones: set[str], *, same_dtype: bool) -> None:
    """Refuse a checkpoint of other parameters: `everyones` are the names of all that any rank holds."""
    index, path = checkpoint.index, checkpoint.path
    for group in state.groups:
        name, shape = group.layout.name, group.layout.global_shape
        saved = index.tensors.get(f"{MASTER}/{name}")
        if saved is None:
            raise UserError(f"{path} has no {name}, which this run's model has")
        if saved.shape != shape:
            raise UserError(f"{path}: {name} has shape {saved.shape}, in this run's model {shape}")
        if same_dtype and saved.dtype != DTYPES[group.master.dtype]:
            raise UserError(
                f"{path}: {name} was saved as {saved.dtype}, this run updates it as {DTYPES[group.master.dtype]}; set "
                f"the same train.dtype, or {WEIGHTS_ONLY}"
            )
    if extra := set(checkpoint.parameters) - everyones:
        raise UserError(f"{path} holds {min(extra)}, which this run's model does not have")


def check_model(checkpoint: Checkpoint, state: RunState, *, weights_only: bool) -> None:
    """Refuse weights of a model that computes something else with them, though their shapes may fit."""
    saved, mine = checkpoint.index.model, plain_config(state.model_config)
    # A key that only one of the two has is another transformers version's: it always writes all that it knows.
    keys = HEADS if weights_only else (*HEADS, *sorted(saved.keys() & mine.keys()))
    for key in keys:
        if saved.get(key) != mine.get(key):
            hint = "" if weights_only or key in HEADS else f"; {WEIGHTS_ONLY}"
            raise UserError(
                f"{checkpoint.path} is of a model with {key} = {saved.get(key)!r}, this run's has "
                f"{mine.get(key)!r}{hint}"
            )


def check_tokenizer(checkpoint: Checkpoint, state: RunState) -> None:
    """Refuse weights to which this run's token ids mean something else; where either has no tokenizer.json, accept."""
    file, mine = f"{MODEL}/{TOKENIZER}", state.tokenizer_path / TOKENIZER
    saved = checkpoint.index.files.get(file)
    if saved is None or not mine.is_file() or checksum_of(mine) == saved:
        return
    checkpoint.verify([file])
    if _rules(checkpoint.path / file) != _rules(mine):
        raise UserError(
            f"{checkpoint.path} was trained on the ids of another tokenizer than the one in {state.tokenizer_path}; "
            f"prepare the data with femto preprocess --tokenizer {checkpoint.path / MODEL}"
        )


def _rules(file: Path) -> dict[str, Any]:
    rules = json.loads(file.read_text(encoding="utf-8"))
    return {key: rules.get(key) for key in TOKENS}


def check_identity(checkpoint: Checkpoint, state: RunState) -> None:
    """Refuse to go on from a run on other data, in other batches, or from another seed."""
    for key, mine in state.identity.items():
        found = checkpoint.index.identity.get(key)
        if found != mine:
            raise UserError(
                f"{checkpoint.path} was saved with {key} = {found!r}, this run has {mine!r}; {WEIGHTS_ONLY}"
            )
