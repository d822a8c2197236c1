"""A checkpoint as a Hugging Face directory: transformers computes the same; the output is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from femto_checkpoint import export as exports
from femto_checkpoint.export import export, plan_shards
from femto_checkpoint.index import MASTER, Checkpoint
from femto_checkpoint.options import ExportConfig
from femto_core.batch import Batch
from femto_core.checkpoint import ExportTensor
from femto_core.cli import run_command
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.trainer import Trainer
from femto_data.tokenizer import saved_tokenizer_fingerprint
from femto_ops.hugging_face import ModelError
from femto_tools.testing import RandomRows, RandomTask, WorkerPool, make_trainer
from tests.checkpoint.runs import Values, checkpoint_of, train_until, values


@attrs.frozen
class WordsTask(RandomTask):
    """Random rows that say which tokenizer wrote them."""

    tokenizer: Path = Path("none")

    @hookimpl
    def femto_dataset(self, config: Any, split: str) -> RandomRows:
        return attrs.evolve(super().femto_dataset(config, split), tokenizer_path=self.tokenizer)


def settings(folder: Path, family: str = "llama", *, tied: bool = True, **more: Any) -> Values:
    model = {"family": family, "tied": tied, **more.pop("model", {})}
    return values(folder, train={"dtype": "float32"}, model=model, **more)


def trained(folder: Path, family: str = "llama", *, tied: bool = True, tokenizer: Path = Path("none")) -> Trainer:
    """Train two steps and save; return the trainer."""
    task = WordsTask(tokenizer=tokenizer)
    trainer = make_trainer(settings(folder, family, tied=tied), (), {"random_task": task})
    trainer.train_step(), trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    return trainer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {word: number for number, word in enumerate(["<s>", "</s>", *(f"w{n}" for n in range(30))])}
    made: Any = PreTrainedTokenizerFast
    fast = made(tokenizer_object=Tokenizer(WordLevel(words, "w0")), bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def from_pretrained(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(path, output_loading_info=True, dtype=dtype)
    assert not any(report.values()), report
    return model.eval()


def logits_of(trainer: Trainer, batch: Batch) -> torch.Tensor:
    trainer.stage.train(False)
    logits = trainer.schedule.forward(trainer.stage, batch, lambda hidden, head: head(hidden))
    trainer.stage.train(True)
    return logits


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False), ("mistral", True)]
)
def test_transformers_computes_what_was_trained_and_femto_goes_on_from_it(
    world_of_one: None, tmp_path: Path, family: str, tied: bool
) -> None:
    trainer = trained(tmp_path, family, tied=tied)
    out = tmp_path / "out"
    files = export(checkpoint_of(tmp_path, 2), ExportConfig(output=str(out)))
    assert files == ["model.safetensors"]
    keys = set(load_file(out / "model.safetensors"))
    assert ("lm_head.weight" in keys) is not tied, "a tied weight is there once"
    model = from_pretrained(out)
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
    batch = trainer.dataset[3]
    with torch.no_grad():
        theirs = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    torch.testing.assert_close(theirs, logits_of(trainer, batch), rtol=1e-5, atol=1e-6)
    loss = trainer.evaluate()
    weights = {g.name: g.master.detach().clone() for g in trainer.shares}
    trainer.close()
    again = make_trainer(settings(tmp_path / "again", model={"path": str(out)}))
    assert all(torch.equal(g.master, weights[g.name]) for g in again.shares)
    assert again.evaluate() == loss
    again.close()


def test_shards_have_an_index_and_hold_each_weight_once(world_of_one: None, tmp_path: Path) -> None:
    trained(tmp_path).close()
    out = tmp_path / "out"
    files = export(checkpoint_of(tmp_path, 2), ExportConfig(output=str(out), shard_gib=4000 / 2**30))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: file for file in files for name in load_file(out / file)}
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(out / f).values())
    assert all((out / f).stat().st_size < 4000 + 2000 for f in files)
    from_pretrained(out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_that_was_asked_for(world_of_one: None, tmp_path: Path, dtype: str) -> None:
    trainer = trained(tmp_path)
    run_command(["export", str(tmp_path / "test"), "--output", str(tmp_path / "out"), "--dtype", dtype])
    exported = load_file(tmp_path / "out" / "model.safetensors")
    wanted: torch.dtype = getattr(torch, dtype)
    for group in trainer.shares:
        assert torch.equal(exported[group.layout.name], group.master.to(wanted))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    trainer.close()


def test_the_tokenizer_goes_along_and_says_where_text_ends(world_of_one: None, tmp_path: Path, tokenizer: Path) -> None:
    trained(tmp_path, tokenizer=tokenizer).close()
    out = tmp_path / "out"
    export(checkpoint_of(tmp_path, 2), ExportConfig(output=str(out)))
    load: Any = AutoTokenizer.from_pretrained
    assert load(out)("w3").input_ids == load(tokenizer)("w3").input_ids
    generation: Any = GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id) == (0, 1)
    config = json.loads((out / "config.json").read_text())
    assert config["use_cache"] is True
    assert config["model_type"] == "llama"


def test_a_tokenizer_that_may_only_be_read_is_no_obstacle(world_of_one: None, tmp_path: Path, tokenizer: Path) -> None:
    for path in (*tokenizer.iterdir(), tokenizer):
        path.chmod(0o555 if path.is_dir() else 0o444)
    trained(tmp_path, tokenizer=tokenizer).close()
    model = checkpoint_of(tmp_path, 2) / "model"
    assert all(path.stat().st_mode & 0o200 for path in (model, *model.iterdir())), "rotation could not remove it"
    for path in (*model.iterdir(), model):
        path.chmod(0o555 if path.is_dir() else 0o444)
    export(checkpoint_of(tmp_path, 2), ExportConfig(output=str(tmp_path / "out")))
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out", *(tmp_path / "out").iterdir()))


def changed(tokenizer: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a tokenizer with a change to its rules."""
    other = tokenizer.with_name("other")
    shutil.copytree(tokenizer, other)
    rules = json.loads((other / "tokenizer.json").read_text())
    change(rules)
    (other / "tokenizer.json").write_text(json.dumps(rules))
    return other


def test_weights_are_not_taken_over_for_ids_of_another_tokenizer(
    world_of_one: None, tmp_path: Path, tokenizer: Path
) -> None:
    trained(tmp_path, tokenizer=tokenizer).close()
    checkpoint = checkpoint_of(tmp_path, 2)
    taking = settings(tmp_path / "new", checkpoint={"resume": str(checkpoint), "weights_only": True})
    other = changed(tokenizer, lambda rules: rules["model"]["vocab"].update({"w3": 6, "w4": 5}))
    for wanted in (taking, settings(tmp_path, checkpoint={"resume": "auto"})):
        with pytest.raises(UserError) as caught:
            make_trainer(wanted, (), {"random_task": WordsTask(tokenizer=other)})
        theirs, ours = (saved_tokenizer_fingerprint(path) for path in (checkpoint / "model", other))
        assert str(caught.value) == (
            f"{checkpoint} was trained on the ids of another tokenizer ({theirs}) than the one in {other} ({ours}); "
            f"prepare the data with femto preprocess --tokenizer {checkpoint / 'model'}"
        )
    for accepted in (tokenizer, Path("none")):
        make_trainer(taking, (), {"random_task": WordsTask(tokenizer=accepted)}).close()


TRUNCATION = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}


def template(rules: dict[str, Any]) -> None:
    """Add a special token before every text."""
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda rules: rules.update(normalizer={"type": "Lowercase"}), True),
        (template, True),
        (lambda rules: rules.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), False),
        (lambda rules: rules.update(truncation=TRUNCATION), False),
    ],
    ids=["normalizer", "special token added", "decoder", "truncation"],
)
def test_a_tokenizer_is_another_where_it_gives_other_ids(
    world_of_one: None, tmp_path: Path, tokenizer: Path, change: Callable[[dict[str, Any]], object], refused: bool
) -> None:
    trained(tmp_path, tokenizer=tokenizer).close()
    taking = settings(tmp_path / "new", checkpoint={"resume": str(checkpoint_of(tmp_path, 2)), "weights_only": True})
    task = {"random_task": WordsTask(tokenizer=changed(tokenizer, change))}
    if refused:
        with pytest.raises(UserError, match="was trained on the ids of another tokenizer"):
            make_trainer(taking, (), task)
    else:
        make_trainer(taking, (), task).close()


def test_another_end_of_text_is_another_tokenizer(world_of_one: None, tmp_path: Path, tokenizer: Path) -> None:
    trained(tmp_path, tokenizer=tokenizer).close()
    other = changed(tokenizer, lambda rules: None)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "w3"}))
    taking = settings(tmp_path / "new", checkpoint={"resume": str(checkpoint_of(tmp_path, 2)), "weights_only": True})
    with pytest.raises(UserError, match="was trained on the ids of another tokenizer"):
        make_trainer(taking, (), {"random_task": WordsTask(tokenizer=other)})


def test_what_two_ranks_saved_is_exported_as_one(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, train_until, values(tmp_path), 2)
    export(checkpoint_of(tmp_path, 2), ExportConfig(output=str(tmp_path / "out")))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    checkpoint = Checkpoint(checkpoint_of(tmp_path, 2))
    assert set(exported) == set(checkpoint.parameters)
    for name, value in exported.items():
        key = f"{MASTER}/{name}"
        assert torch.equal(value, checkpoint.read(key, checkpoint.whole(key)).float())


def test_shards_are_filled_in_order_and_never_split_a_tensor() -> None:
    shapes = {"a": (10,), "b": (10,), "c": (25,), "d": (1,), "e": ()}
    assert plan_shards(shapes, 80, 4) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d", "e"],
    }


# Exports that plugins change.


def with_average(folder: Path) -> Trainer:
    """Train two steps, keep an average of the weights as a field of the optimizer's state, and save."""
    trainer = make_trainer(settings(folder))
    trainer.train_step(), trainer.train_step()
    for group in trainer.shares:
        trainer.optimizer.state[group.master]["ema"] = group.master.detach() * 0.5
    trainer.save()
    trainer.checkpointer.wait()
    return trainer


def test_an_averaged_copy_is_exported_in_the_place_of_the_weights(world_of_one: None, tmp_path: Path) -> None:
    trainer = with_average(tmp_path)

    def change(
        tensors: dict[str, ExportTensor], saved: Mapping[str, ExportTensor], settings: Mapping[str, Any]
    ) -> None:
        assert settings["train"]["dtype"] == "float32"
        assert {f"{field}/{name}" for field in ("master", "ema", "exp_avg") for name in tensors} <= set(saved)
        tensors.update({name: saved[f"ema/{name}"] for name in tensors})

    export(checkpoint_of(tmp_path, 2), ExportConfig(output=str(tmp_path / "out")), change)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert set(exported) == {group.name for group in trainer.shares}
    for group in trainer.shares:
        assert torch.equal(exported[group.name], group.master.detach() * 0.5)
    from_pretrained(tmp_path / "out")
    trainer.close()


class Adapted(torch.nn.Module):
    """A matrix with a low-rank update beside it."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = inner.weight
        self.lora_A = torch.nn.Parameter(torch.empty(2, inner.in_features, device="meta"))
        self.lora_B = torch.nn.Parameter(torch.empty(inner.out_features, 2, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return linear(hidden, self.weight) + linear(linear(hidden, self.lora_A), self.lora_B)


@attrs.define
class AdaptedWeights:
    """The model's own weights, and ones for those of the adapters."""

    inner: Any

    def read(self, name: str, boxes: Any) -> list[torch.Tensor]:
        if "lora" in name:
            return [torch.ones(box.sizes) for box in boxes]
        values: list[torch.Tensor] = self.inner.read(name, boxes)
        return values


class Adapters:
    """A plugin that adapts the first layer's output projection."""

    @hookimpl
    def femto_transform_model(self, model: Any) -> None:
        attention = model.module.model.layers[0].self_attn
        attention.o_proj = Adapted(attention.o_proj)
        model.weights = AdaptedWeights(model.weights)


PROJECTION = "model.layers.0.self_attn.o_proj"


def with_adapters(folder: Path) -> Trainer:
    objects = {"random_task": RandomTask(), "adapters": Adapters()}
    trainer = make_trainer(settings(folder), (), objects)
    trainer.train_step()
    trainer.save()
    trainer.checkpointer.wait()
    return trainer


def merge_adapters(
    tensors: dict[str, ExportTensor], saved: Mapping[str, ExportTensor], settings: Mapping[str, Any]
) -> None:
    weight, a, b = (tensors.pop(f"{PROJECTION}.{name}") for name in ("weight", "lora_A", "lora_B"))
    merged = ExportTensor(weight.shape, lambda: weight.read() + b.read() @ a.read())
    tensors[f"{PROJECTION}.weight"] = merged


def test_an_adapter_is_merged_and_the_merged_model_computes_what_was_trained(
    world_of_one: None, tmp_path: Path
) -> None:
    trainer = with_adapters(tmp_path)
    out = tmp_path / "out"
    export(checkpoint_of(tmp_path, 1), ExportConfig(output=str(out)), merge_adapters)
    batch = trainer.dataset[3]
    with torch.no_grad():
        theirs = from_pretrained(out)(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    torch.testing.assert_close(theirs, logits_of(trainer, batch), rtol=1e-5, atol=1e-6)
    trainer.close()


def test_tensors_that_the_model_does_not_have_are_refused_by_name(world_of_one: None, tmp_path: Path) -> None:
    with_adapters(tmp_path).close()
    path, out = checkpoint_of(tmp_path, 1), tmp_path / "out"
    with pytest.raises(UserError) as caught:
        export(path, ExportConfig(output=str(out)))
    assert str(caught.value) == (
        f"{path} would be exported with {PROJECTION}.lora_A, which LlamaForCausalLM does not have; the run used the "
        "plugins random_task, adapters: name them with --plugins, so that they can convert it"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "without model.norm.weight, which LlamaForCausalLM has"),
        (
            lambda tensors: tensors.update({"model.norm.weight": ExportTensor((3,), lambda: torch.ones(3))}),
            r"with model.norm.weight of shape \(3,\), which LlamaForCausalLM has as \(16,\)",
        ),
    ],
    ids=["missing", "another shape"],
)
def test_tensors_that_are_not_the_models_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, ExportTensor]], object], said: str
) -> None:
    def change_only(tensors: dict[str, ExportTensor], *_: object) -> None:
        change(tensors)

    with pytest.raises(UserError, match=said):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "out")), change_only)
    assert not list(tmp_path.iterdir())


def test_a_tensor_of_another_shape_than_announced_is_a_defect(saved: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, ExportTensor], *_: object) -> None:
        tensors["model.norm.weight"] = ExportTensor((16,), lambda: torch.ones(3))

    with pytest.raises(ValueError, match=r"model\.norm\.weight was announced with shape \(16,\), but .* \(3,\)"):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "out")), change)
    assert not list(tmp_path.iterdir())


def test_a_model_that_transformers_does_not_have_is_refused_since_its_names_cannot_be_checked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise ModelError("no model of type 'new'")

    monkeypatch.setattr("femto_checkpoint.compatibility.build_causal_lm", unknown)
    with pytest.raises(UserError, match=r"cannot build the model .*\(no model of type 'new'\), so .* be checked"):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "out")))
    assert not list(tmp_path.iterdir())


# Refusals.


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("saved")
    pool.run(1, train_until, values(folder), 1)
    return folder


def spoil_config(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "rank-00000.safetensors").unlink(), "is missing or cannot be read"),
        (lambda folder: (folder / "model" / "config.json").unlink(), "config.json is missing"),
        (spoil_config, "config.json is "),
        (lambda folder: (folder / "checkpoint.json").unlink(), "is not a complete femto checkpoint"),
    ],
    ids=["weights", "no config", "changed config", "index"],
)
def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    copy = tmp_path / "step-1"
    shutil.copytree(checkpoint_of(saved, 1), copy)
    damage(copy)
    with pytest.raises(UserError, match=words):
        export(copy, ExportConfig(output=str(tmp_path / "out")))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_an_output_that_is_taken_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "out")))  # empty: fine
    with pytest.raises(UserError, match="exists and is not empty"):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "out")))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "file")))
    with pytest.raises(UserError, match="lies inside the checkpoint"):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(checkpoint_of(saved, 1) / "out")))
    with pytest.raises(UserError, match="cannot be written"):
        export(checkpoint_of(saved, 1), ExportConfig(output=str(tmp_path / "file" / "below")))


def test_values_that_do_not_fit_the_dtype_are_refused(world_of_one: None, tmp_path: Path) -> None:
    trainer = make_trainer(settings(tmp_path))
    with torch.no_grad():
        trainer.shares[0].master[0, 0] = 1e6
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    with pytest.raises(UserError, match=r"too large for torch\.float16; export it as bfloat16 or float32"):
        export(checkpoint_of(tmp_path, 0), ExportConfig(output=str(tmp_path / "out"), dtype="float16"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "femto export needs CHECKPOINT"),
        (["--output", "x"], "femto export needs CHECKPOINT"),
        (["nowhere", "--output", "x"], "nowhere is not a complete femto checkpoint"),
    ],
    ids=str,
)
def test_the_command_refuses_what_is_no_checkpoint(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_command(["export", *words])


def test_a_run_without_checkpoints_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"no complete checkpoint; set --checkpoint\.every"):
        run_command(["export", str(tmp_path), "--output", "x"])


def test_the_contents_of_a_checkpoint_are_shown(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoint", "inspect", str(saved / "test")]) == 0
    shown = capsys.readouterr().out
    assert "step 1, saved on dp 1" in shown
    assert "model.norm.weight [16] F64, in 1 piece(s)" in shown
    assert "the optimizer keeps exp_avg, exp_avg_sq, step" in shown


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", ["write_safetensors", "_write_configs", "check_export", "_compare"])
def test_killed_while_exporting_nothing_half_is_there(saved: Path, tmp_path: Path, place: str) -> None:
    out = tmp_path / "out"
    child = os.fork()
    if not child:
        right: Any = getattr(exports, place)

        def killed(*arguments: Any, **more: Any) -> None:
            right(*arguments, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(exports, place, killed)
        export(checkpoint_of(saved, 1), ExportConfig(output=str(out)))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not out.exists()
    assert export(checkpoint_of(saved, 1), ExportConfig(output=str(out))) == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "what the kill left is swept up"
