"""What an export keeps of the model that training started from: how answers end; and what it drops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from femto_checkpoint.export import export
from femto_checkpoint.options import ExportConfig
from femto_core.batch import IGNORE_INDEX, Batch
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_tools.testing import RandomRows, RandomTask, make_trainer
from tests.checkpoint.runs import checkpoint_of, values
from tests.models import tiny_config

BEGIN, END_OF_TEXT, END_OF_TURN, PADDING = 0, 1, 2, 3
PROMPT, ANSWER = [BEGIN, 10, 11], [12, 13, 14, 15, 16, 17, END_OF_TURN]
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.43.0"}


@attrs.frozen
class ChatRows(RandomRows):
    """One conversation in every row; what follows the end of the turn is not trained."""

    def __getitem__(self, index: int) -> Batch:
        row = torch.tensor([PROMPT + ANSWER])
        targets = row[:, 1:].clone()
        targets[:, : len(PROMPT) - 1] = IGNORE_INDEX
        return Batch(input_ids=row[:, :-1], targets=targets, position_ids=torch.arange(row.shape[1] - 1)[None])


@attrs.frozen
class ChatTask(RandomTask):
    """Conversations, and the tokenizer that wrote them."""

    tokenizer: Path = Path("none")

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        return ChatRows(self, config.data.seq_len, 32, 0, self.tokenizer)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A chat model like Llama 3: config.json ends a text, generation_config.json also a turn."""
    folder = tmp_path / "source"
    torch.manual_seed(3)
    make: Any = AutoModelForCausalLM.from_config
    make(tiny_config(bos_token_id=BEGIN, eos_token_id=END_OF_TEXT)).save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": [END_OF_TEXT, END_OF_TURN], **SAMPLING})
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The tokenizer beside the data; its own EOS is the end of a text."""
    names = ["<begin>", "<end_of_text>", "<end_of_turn>", "<pad>"]
    words = {word: number for number, word in enumerate([*names, *(f"w{n}" for n in range(28))])}
    backend = Tokenizer(WordLevel(words, "w0"))
    backend.add_special_tokens([AddedToken(name) for name in names])
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=backend, bos_token=names[0], eos_token=names[1], pad_token=names[3]).save_pretrained(
        tmp_path / "words"
    )
    return tmp_path / "words"


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values))


def exported(folder: Path, source: Path, tokenizer: Path, steps: int = 2) -> Path:
    """Fine-tune `source` on the conversation, save, and return the export."""
    settings = values(
        folder,
        train={"dtype": "float32", "steps": steps},
        data={"seq_len": len(PROMPT + ANSWER) - 1, "micro_batch": 8},
        model={"path": str(source)},
        optim={"lr": 2e-2, "warmup": 1},
    )
    trainer = make_trainer(settings, (), {"random_task": ChatTask(tokenizer=tokenizer)})
    for _ in range(steps):
        trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    export(checkpoint_of(folder, steps), ExportConfig(output=str(folder / "out")))
    return folder / "out"


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "generation_config.json").read_text())
    return found


def answer(folder: Path) -> list[int]:
    """What transformers generates after the prompt, without sampling, in at most 40 tokens."""
    load: Any = AutoModelForCausalLM.from_pretrained
    ids = load(folder).generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40)
    found: list[int] = ids[0, len(PROMPT) :].tolist()
    return found


def test_an_exported_chat_model_ends_its_answers(
    world_of_one: None, tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    out = exported(tmp_path, source, tokenizer, steps=40)
    assert answer(out) == ANSWER, "7 tokens, the last of them the end of the turn"
    (out / "generation_config.json").unlink()
    assert len(answer(out)) == 40, "config.json alone never ends it"


def test_the_end_of_turn_that_the_data_taught_is_added(
    world_of_one: None, tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    (source / "generation_config.json").unlink()  # a base model
    write_json(tokenizer / "generation_config.json", {"eos_token_id": END_OF_TURN})
    out = exported(tmp_path, source, tokenizer, steps=40)
    assert read(out) == {
        "bos_token_id": BEGIN,
        "eos_token_id": [END_OF_TEXT, END_OF_TURN],
        "pad_token_id": PADDING,
    }
    assert answer(out) == ANSWER


def test_the_source_decides_and_what_is_in_both_is_there_once(
    world_of_one: None, tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    write_json(tokenizer / "generation_config.json", {"eos_token_id": [END_OF_TURN, 9], "temperature": 2.0})
    out = exported(tmp_path, source, tokenizer)
    assert read(out)["eos_token_id"] == [END_OF_TEXT, END_OF_TURN, 9]
    assert {key: read(out)[key] for key in SAMPLING} == SAMPLING
    load: Any = GenerationConfig.from_pretrained
    assert (load(out).temperature, load(out).top_p, load(out).do_sample) == (0.6, 0.9, True)
    again = exported(tmp_path / "again", out, tokenizer)
    assert read(again) == read(out), "an export of an export"


def test_random_weights_take_nothing_from_the_directory(
    world_of_one: None, tmp_path: Path, source: Path, tokenizer: Path
) -> None:
    shutil.move(source / "model.safetensors", tmp_path / "aside")
    settings = values(tmp_path, data={"seq_len": 9}, model={"path": str(source), "weights": "random"})
    trainer = make_trainer(settings, (), {"random_task": ChatTask(tokenizer=tokenizer)})
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    assert read(checkpoint_of(tmp_path, 0) / "model")["eos_token_id"] == END_OF_TEXT
    load: Any = AutoTokenizer.from_pretrained
    assert load(tokenizer).eos_token_id == END_OF_TEXT


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "generation_config.json is damaged"),
        ('{"eos_token_id": "<end>"}', "generation_config.json: eos_token_id = '<end>' must be a token id, or a list"),
        ('{"eos_token_id": [1, 2.5]}', "generation_config.json: eos_token_id = [1, 2.5] must be a token id"),
    ],
)
def test_a_damaged_file_is_refused_before_training(
    world_of_one: None, tmp_path: Path, source: Path, content: str, said: str
) -> None:
    (source / "generation_config.json").write_text(content)
    with pytest.raises(UserError) as caught:
        make_trainer(values(tmp_path, data={"seq_len": 9}, model={"path": str(source)}))
    assert said in str(caught.value)


# Keys of config.json.


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "of my own"},
    ],
    ids=lambda said: str(said["quant_method"]),
)
def test_a_quantisation_that_the_weights_do_not_have_is_dropped(
    world_of_one: None, tmp_path: Path, source: Path, tokenizer: Path, said: dict[str, Any]
) -> None:
    config = json.loads((source / "config.json").read_text())
    write_json(source / "config.json", {**config, "quantization_config": said})
    out = exported(tmp_path, source, tokenizer)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    load: Any = AutoModelForCausalLM.from_pretrained
    _, report = load(out, output_loading_info=True)
    assert not any(report.values())
