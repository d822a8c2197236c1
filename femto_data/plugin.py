"""The built-in data plugin: the dataset seat for prepared rows, `femto preprocess` and `femto data-inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from femto_core.commands import CommandRegistry
    from femto_core.config import Config
    from femto_core.data import Dataset
    from femto_data.config import InspectConfig, PreprocessConfig

STANDARD_LIBRARY_VOCAB = 2048


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    from femto_data.config import InspectConfig, PreprocessConfig

    registry.add("preprocess", "turn text into a dataset", PreprocessConfig, preprocess_command)
    registry.add("data-inspect", "show a dataset's counts, and rows as text", InspectConfig, inspect_command)


@attrs.frozen(kw_only=True)
class CorpusSection:
    """The Python standard library's own sources, which are read where data.path is empty."""

    cache: str = "~/.cache/femto"
    """Where their tokens are kept after the first time."""


@hookimpl
def femto_config_section() -> tuple[str, type[CorpusSection]]:
    return "corpus", CorpusSection


@hookimpl
def femto_dataset(config: Config, split: str) -> Dataset:
    from femto_data.corpus import standard_library_dataset
    from femto_data.dataset import PackedDataset

    section = config.data
    if section.path:
        directory = Path(section.path)
        directory = directory.parent if directory.is_file() else directory  # the folder is meant
    else:
        cache = Path(config.section(CorpusSection).cache).expanduser()
        vocab = config.model.vocab_size or STANDARD_LIBRARY_VOCAB
        directory = standard_library_dataset(cache, seq_len=section.seq_len, vocab_size=vocab)
    if split == "held_out" and directory.is_dir() and not (directory / "held_out.safetensors").exists():
        return NoRows()
    dataset = PackedDataset(directory / f"{split}.safetensors")
    if dataset.seq_len != section.seq_len:
        raise UserError(
            f"{directory} has rows of {dataset.seq_len} tokens, but data.seq_len = {section.seq_len}; set "
            f"--data.seq-len {dataset.seq_len}, or write it again with femto preprocess --seq-len {section.seq_len}"
        )
    if config.model.path:
        check_tokenizer(Path(config.model.path), dataset.tokenizer_fingerprint)
    return dataset


def check_tokenizer(model: Path, fingerprint: str) -> None:
    """Raise UserError if data was written with another tokenizer than the model's; accept a model without one."""
    from femto_data.tokenizer import saved_tokenizer_fingerprint

    found = saved_tokenizer_fingerprint(model)
    if found not in (None, fingerprint):
        raise UserError(
            f"the data was written with another tokenizer ({fingerprint}) than the one in {model} ({found}); run "
            f"femto preprocess --tokenizer {model}"
        )


class NoRows:
    """The held-out split of a dataset without held-out documents: no rows."""

    vocab_size = 0
    tokenizer_path = Path()
    fingerprint = "none"

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> torch.Tensor:
        raise IndexError(f"row {index} of no held-out rows")


def preprocess_command(config: PreprocessConfig) -> int:
    """Write the dataset and print its manifest."""
    from femto_data.preprocess import preprocess  # the libraries that read data take seconds to load

    print(json.dumps(attrs.asdict(preprocess(config)), indent=2))
    return 0


def inspect_command(config: InspectConfig) -> int:
    """Print what a dataset holds."""
    from femto_data.inspection import describe

    for line in describe(config):
        print(line)
    return 0
