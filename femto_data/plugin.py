"""The built-in data plugin: the dataset seat for prepared rows, `femto preprocess` and `femto data-inspect`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from femto_core.cli import CommandRegistry
    from femto_core.config import Config
    from femto_core.data import Dataset

STANDARD_LIBRARY_VOCAB = 2048


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    registry.add("preprocess", "turn text into a dataset", preprocess_command)
    registry.add("data-inspect", "show a dataset's counts, and rows as text", inspect_command)


@hookimpl
def femto_dataset(config: Config, split: str) -> Dataset:
    from femto_data.corpus import standard_library_dataset
    from femto_data.dataset import PackedDataset

    section = config.data
    if section.path:
        directory = Path(section.path)
    else:
        cache = Path(section.cache).expanduser()
        vocab = config.model.vocab_size or STANDARD_LIBRARY_VOCAB
        directory = standard_library_dataset(cache, seq_len=section.seq_len, vocab_size=vocab)
    if split == "held_out" and directory.is_dir() and not (directory / "held_out.safetensors").exists():
        return NoRows()
    dataset = PackedDataset(directory / f"{split}.safetensors")
    if dataset.seq_len != section.seq_len:
        raise UserError(
            f"{directory} has rows of {dataset.seq_len} tokens, but data.seq_len = {section.seq_len}; set "
            f"--data.seq-len {dataset.seq_len}, or cut it anew with femto preprocess --seq-len {section.seq_len}"
        )
    if config.model.path:
        check_tokenizer(Path(config.model.path), dataset.tokenizer_fingerprint)
    return dataset


def check_tokenizer(model: Path, fingerprint: str) -> None:
    """Refuse data that was written with another tokenizer than the one beside the model, where there is one."""
    if not (model / "tokenizer_config.json").exists():
        return
    from femto_data.tokenizer import load_tokenizer, tokenizer_fingerprint

    found = tokenizer_fingerprint(load_tokenizer(str(model)))
    if found != fingerprint:
        raise UserError(
            f"the data was written with another tokenizer ({fingerprint}) than the one in {model} ({found}); run "
            f"femto preprocess --tokenizer {model}"
        )


class NoRows:
    """The held-out part of a dataset that has none."""

    vocab_size = 0
    tokenizer_path = Path()
    fingerprint = "none"

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> torch.Tensor:
        raise IndexError(f"there are no held-out rows, asked for row {index}")


def preprocess_command(words: Sequence[str]) -> int:
    """Turn text into a dataset."""
    import tyro  # this and the libraries that read data take seconds to load

    from femto_data.config import PreprocessConfig

    config = tyro.cli(
        PreprocessConfig,
        args=list(words),
        prog="femto preprocess",
        description=inspect.cleandoc(PreprocessConfig.__doc__ or ""),
    )
    from femto_data.preprocess import preprocess

    print(json.dumps(attrs.asdict(preprocess(config)), indent=2))
    return 0


def inspect_command(words: Sequence[str]) -> int:
    """Show what a dataset holds."""
    import tyro

    from femto_data.config import InspectConfig

    config = tyro.cli(
        InspectConfig,
        args=list(words),
        prog="femto data-inspect",
        description=inspect.cleandoc(InspectConfig.__doc__ or ""),
        config=(tyro.conf.PositionalRequiredArgs,),
    )
    from femto_data.inspection import describe

    for line in describe(config):
        print(line)
    return 0
