"""Whether a checkpoint can be loaded into a run, and whether an export has the tensors of its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from femto_checkpoint.files import DTYPES, checksum_of
from femto_checkpoint.index import MASTER, Checkpoint
from femto_checkpoint.writer import MODEL
from femto_core.checkpoint import RunState
from femto_core.errors import UserError
from femto_data.tokenizer import TOKENIZER_FILES, saved_tokenizer_fingerprint
from femto_ops.hugging_face import ModelError, build_causal_lm, read_config

WEIGHTS_ONLY = "to load only its weights, set --checkpoint.weights-only"
NOT_COMPARED = {
    *("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache", "_attn_implementation"),
    *("initializer_range", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp", "chunk_size_feed_forward"),
}
"""Keys of a transformers config that do not affect what the weights compute."""
HEADS = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
"""Keys that change what the weights compute without changing their shapes; compared even with weights_only."""


def plain_config(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of `config` that are compared, as plain JSON values."""
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_COMPARED}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def check_parameters(checkpoint: Checkpoint, state: RunState, all_names: set[str], *, same_dtype: bool) -> None:
    """Refuse a checkpoint whose parameters differ in name, shape or, with `same_dtype`, dtype.

    `all_names` are the parameters of all ranks together, `state.shares` those of this rank.
    """
    index, path = checkpoint.index, checkpoint.path
    for share in state.shares:
        name, shape = share.layout.name, share.layout.global_shape
        saved = index.tensors.get(f"{MASTER}/{name}")
        if saved is None:
            raise UserError(f"{path} has no {name}, which this run's model has")
        if saved.shape != shape:
            raise UserError(f"{path}: {name} has shape {saved.shape}, in this run's model {shape}")
        if same_dtype and saved.dtype != DTYPES[share.master.dtype]:
            raise UserError(
                f"{path}: {name} was saved as {saved.dtype}, this run updates it as {DTYPES[share.master.dtype]}; set "
                f"the same train.dtype, or {WEIGHTS_ONLY}"
            )
    if extra := set(checkpoint.parameters) - all_names:
        raise UserError(f"{path} holds {min(extra)}, which this run's model does not have")


def check_model(checkpoint: Checkpoint, state: RunState, *, weights_only: bool) -> None:
    """Refuse weights of a model that computes something else with them, even if all shapes fit."""
    saved, mine = checkpoint.index.model, plain_config(state.model_config)
    # transformers writes every key it knows, so a key on one side only comes from another version of it.
    keys = HEADS if weights_only else (*HEADS, *sorted(saved.keys() & mine.keys()))
    for key in keys:
        if saved.get(key) != mine.get(key):
            hint = "" if weights_only or key in HEADS else f"; {WEIGHTS_ONLY}"
            raise UserError(
                f"{checkpoint.path} is of a model with {key} = {saved.get(key)!r}, this run's has "
                f"{mine.get(key)!r}{hint}"
            )


def check_tokenizer(checkpoint: Checkpoint, state: RunState) -> None:
    """Refuse weights that were trained on the ids of another tokenizer; without a tokenizer on either side, accept."""
    saved, mine = checkpoint.path / MODEL, state.tokenizer_path
    sums = {file: checkpoint.index.files.get(f"{MODEL}/{file}") for file in TOKENIZER_FILES}
    if sums == {file: checksum_of(mine / file) if (mine / file).is_file() else None for file in TOKENIZER_FILES}:
        return
    checkpoint.verify(f"{MODEL}/{file}" for file, found in sums.items() if found is not None)
    theirs, ours = saved_tokenizer_fingerprint(saved), saved_tokenizer_fingerprint(mine)
    if theirs and ours and theirs != ours:
        raise UserError(
            f"{checkpoint.path} was trained on the ids of another tokenizer ({theirs}) than the one in {mine} "
            f"({ours}); prepare the data with femto preprocess --tokenizer {saved}"
        )


def check_identity(checkpoint: Checkpoint, state: RunState) -> None:
    """Refuse to resume a run that had other data, another batch size or another seed."""
    for key, mine in state.identity.items():
        found = checkpoint.index.identity.get(key)
        if found != mine:
            raise UserError(
                f"{checkpoint.path} was saved with {key} = {found!r}, this run has {mine!r}; {WEIGHTS_ONLY}"
            )


def check_export(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> torch.nn.Module:
    """Return the model of `folder`/config.json; refuse an export whose tensors are not exactly its parameters.

    `shapes` has the exported tensors by name. transformers builds the model on the meta device; a tied weight counts
    once. Raises `UserError` also where transformers cannot build it, since nothing could then be compared.
    """
    path, model = checkpoint.path, _meta_model(checkpoint.path, folder)
    kind = type(model).__name__
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    used = ", ".join(checkpoint.index.plugins)
    hint = f"; the run used the plugins {used}: name them with --plugins, so that they can convert it" if used else ""
    if extra := shapes.keys() - wanted.keys():
        raise UserError(f"{path} would be exported with {min(extra)}, which {kind} does not have{hint}")
    if missing := wanted.keys() - shapes.keys():
        raise UserError(f"{path} would be exported without {min(missing)}, which {kind} has{hint}")
    for name, shape in sorted(shapes.items()):
        if shape != wanted[name]:
            raise UserError(
                f"{path} would be exported with {name} of shape {shape}, which {kind} has as {wanted[name]}{hint}"
            )
    return model


def _meta_model(path: Path, folder: Path) -> torch.nn.Module:
    try:
        model: torch.nn.Module = build_causal_lm(read_config(folder), "")
    except ModelError as error:
        raise UserError(
            f"{path} cannot be exported: transformers {transformers.__version__} cannot build the model of its "
            f"config.json ({error}), so the tensors' names cannot be checked; install one that has this model"
        ) from None
    return model
