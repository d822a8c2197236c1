"""Samples of text: rank 0 decides and draws, and steps that did not happen leave none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from femto_core.hookspecs import hookimpl
from femto_report.samples import Samples
from femto_tools.testing import RandomRows, RandomTask, WorkerPool, make_trainer


@attrs.frozen
class TokenizedTask(RandomTask):
    """Random rows, and a tokenizer that only the machine of rank 0 has."""

    tokenizer: str = ""

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        rows = RandomTask.femto_dataset(self, config, split)
        return attrs.evolve(rows, tokenizer_path=Path("none" if dist.get_rank() else self.tokenizer))


def sampled(tokenizer: str, folder: str, step: int) -> None:
    values = {
        "run": {"dir": folder},
        "sample": {"prompts": ("word1", "word2"), "tokens": 2},
        "train": {"stop_after": 4},
    }
    trainer = make_trainer(values, (), {"task": TokenizedTask(tokenizer=tokenizer), "writes": Samples()})
    trainer.step = step
    trainer.train()
    trainer.close()


def test_a_rank_without_the_tokenizer_takes_part_and_steps_that_did_not_happen_are_dropped(
    pool: WorkerPool, tmp_path: Path
) -> None:
    tokenizer = str(tmp_path / "tokenizer")
    words = Tokenizer(WordLevel({"word1": 1, "word2": 2, "?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tokenizer)  # type: ignore[no-untyped-call]
    file = tmp_path / "test" / "samples.jsonl"
    pool.run(2, sampled, tokenizer, str(tmp_path), 0)

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]

    assert steps() == [0, 0, 4, 4]
    with file.open("a") as lines:
        lines.writelines(json.dumps({"step": step, "prompt": "", "text": ""}) + "\n" for step in (2, 3, 9))
    pool.run(2, sampled, tokenizer, str(tmp_path), 3)
    assert steps() == [0, 0, 2, 3, 3, 4, 4]


def test_without_a_tokenizer_no_rank_samples(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, sampled, str(tmp_path / "nowhere"), str(tmp_path), 0)
    assert not (tmp_path / "test" / "samples.jsonl").exists()
