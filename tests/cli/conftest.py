"""Shared by the tests of the command line: a small dataset on disk, made once by femto preprocess itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from femto_data.config import PreprocessConfig
from femto_data.preprocess import preprocess


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        words = " ".join(f"word{(number * 7 + i * i) % 23}" for i in range(60))
        (folder / f"{number:02}.txt").write_text(words)
    output = folder / "rows"
    config = PreprocessConfig(
        input=(str(folder),), output=str(output), seq_len=16, vocab_size=300, held_out=0.2, glob="*.txt"
    )
    preprocess(config, quiet=True)
    return output
