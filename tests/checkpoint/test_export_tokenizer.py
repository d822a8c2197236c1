"""The tokenizer of an export: femto reads it as it was trained with, and says where AutoTokenizer does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from transformers import AutoTokenizer, TokenizersBackend

from femto_core.cli import run_command
from femto_core.hookspecs import hookimpl
from femto_data.tokenizer import load_tokenizer, tokenizer_fingerprint, train_tokenizer
from femto_tools.testing import RandomRows, RandomTask, make_trainer
from tests.checkpoint.runs import checkpoint_of, values

TEXT = "cafe\u0301 nai\u0308ve it's 123"
SIZE = 320


@attrs.frozen
class Task(RandomTask):
    tokenizer: Path = Path("none")

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        return RandomRows(self, config.data.seq_len, SIZE, 0, self.tokenizer)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of femto's, with tokens of decomposed accents."""
    folder: Path = tmp_path_factory.mktemp("own")
    train_tokenizer([TEXT] * 50, SIZE).save_pretrained(folder)
    return folder


def ids(tokenizer: Any) -> list[int]:
    found: list[int] = tokenizer(TEXT)["input_ids"]
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_an_export_is_read_with_the_ids_of_training_or_it_is_said(
    world_of_one: None, tmp_path: Path, own: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"random_task": Task(tokenizer=own)}
    sizes = {"vocab_size": SIZE, "family": family}
    trainer = make_trainer(values(tmp_path, model=sizes), (), task)
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    out = tmp_path / "out"
    run_command(["export", str(checkpoint_of(tmp_path, 0)), "--output", str(out)])
    warning = capsys.readouterr().err
    auto: Any = AutoTokenizer.from_pretrained
    trained: Any = TokenizersBackend.from_pretrained(own)
    same = ids(auto(out)) == ids(trained)
    assert same is (family != "qwen2")
    assert ("AutoTokenizer takes Qwen2Tokenizer for this model, which gives other ids" in warning) is not same
    read = load_tokenizer(str(out))
    assert ids(read) == ids(trained)
    assert tokenizer_fingerprint(read) == tokenizer_fingerprint(trained)
    # Training goes on from the export, and from the checkpoint's weights, on rows of the same tokenizer.
    make_trainer(values(tmp_path / "a", model={"path": str(out), "vocab_size": SIZE}), (), task).close()
    taking = {"resume": str(checkpoint_of(tmp_path, 0)), "weights_only": True}
    again = {"random_task": Task(tokenizer=out)}
    make_trainer(values(tmp_path / "b", model=sizes, checkpoint=taking), (), again).close()
