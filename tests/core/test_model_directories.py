"""Model directories of others: nothing they hold is run, nothing outside is read, and a mistake is named by its key."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from femto_core.architecture import build_model
from femto_core.cli import run_command
from femto_core.errors import UserError
from femto_core.layout import Box
from femto_core.sections import ModelSection
from femto_ops.hugging_face import INDEX, SINGLE
from tests.models import tiny_config

NORM = "model.norm.weight"
MISSING: Any = ...


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save(folder)
    return folder


@pytest.fixture
def model(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "model")
    return tmp_path / "model"


def save(folder: Path, **options: Any) -> None:
    torch.manual_seed(3)
    make: Any = AutoModelForCausalLM.from_config
    make(tiny_config()).save_pretrained(folder, **options)


def configure(folder: Path, **changes: Any) -> None:
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not MISSING}))


def refusal(folder: Path) -> str:
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        build_model(ModelSection(path=str(folder)), seed=0)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 10
    return str(caught.value)


def first_norm(folder: Path) -> torch.Tensor:
    """The norm's weights that femto reads."""
    full = build_model(ModelSection(path=str(folder)), seed=0)
    [values] = full.weights.read(NORM, [Box((0,), (16,))])
    return values


def theirs(folder: Path) -> torch.Tensor:
    """The norm's weights that transformers reads."""
    load: Any = AutoModelForCausalLM.from_pretrained
    values: torch.Tensor = load(folder).model.norm.weight.detach()
    return values


# Code.


@pytest.mark.parametrize("kind", ["llama", "of my own"])
def test_code_in_the_directory_is_never_run_nor_asked_for(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("a question was asked")

    monkeypatch.setattr("builtins.input", asked)
    (model / "code.py").write_text("open('ran', 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n")
    names = {"AutoConfig": "code.LlamaConfig", "AutoModelForCausalLM": "code.LlamaForCausalLM"}
    configure(model, model_type=kind, auto_map=names)
    monkeypatch.chdir(model)
    if kind == "llama":  # transformers' own code, as without auto_map
        assert type(build_model(ModelSection(path=str(model)), seed=0).module).__module__.startswith("transformers.")
    else:
        said = "auto_map asks for code from the directory, which femto never runs"
        assert refusal(model) == f"{model / 'config.json'}: {said}"
    assert not (model / "ran").exists()


# Keys of config.json.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "swiglu"}, "hidden_act = 'swiglu': transformers cannot use it"),
        ({"hidden_act": 3}, "hidden_act = 3: transformers cannot use it"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_parameters.rope_type = 'foo'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "two", "rope_theta": 1e4}},
            "rope_parameters.factor = 'two' must be a number",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}},
            "rope_parameters.factor = 0 must be greater than 0",
        ),
        (
            {"rope_parameters": MISSING, "rope_scaling": {"type": "linear", "factor": "2"}},
            "rope_scaling.factor = '2' must be a number",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "{'factor'}"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 must lie in [1, "),
        ({"num_key_value_heads": -1}, "num_key_value_heads = -1 must lie in [1, "),
        ({"num_attention_heads": "four"}, "num_attention_heads = 'four': transformers cannot use it"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 must lie in [1, 4096]"),
        ({"intermediate_size": 10**18}, "intermediate_size = 1000000000000000000 must lie in"),
        ({"hidden_size": 10**9}, "hidden_size = 1000000000 must lie in"),
        ({"vocab_size": 10**11}, "vocab_size = 100000000000 must lie in"),
        ({"head_dim": 0}, "head_dim = 0 must lie in"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps = 'small': transformers cannot use it"),
        ({"dtype": "float99"}, "dtype = 'float99': transformers cannot use it"),
        ({"model_type": MISSING}, "it has no model_type"),
        ({"model_type": "llamma"}, "model_type = 'llamma' is no model that transformers"),
        ({"model_type": ["llama"]}, "model_type = ['llama'] is no model that transformers"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_model_is_named_with_file_and_key(
    model: Path, changes: dict[str, Any], said: str
) -> None:
    configure(model, **changes)
    answer = refusal(model)
    assert answer.startswith(f"{model / 'config.json'}: ")
    assert said in answer


@pytest.mark.parametrize("content", [b"", b'{"model_type": ', b"[]", b"3", b"\xff\xfe{}", b"[" * 10**5], ids=len)
def test_a_config_that_is_no_json_object_is_damaged(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    assert refusal(model).startswith(f"{model / 'config.json'} is damaged")


def test_more_parameters_than_any_machine_holds_are_refused_with_the_largest(model: Path) -> None:
    configure(model, intermediate_size=2**24, hidden_size=2**24, num_hidden_layers=1)
    answer = refusal(model)
    assert "hidden_size = 16777216 makes a model of 8.4e+14 parameters" in answer
    assert "has [16777216, 16777216]" in answer


def test_an_attention_that_the_model_lacks_names_the_one_it_has(tmp_path: Path) -> None:
    tiny_config("gpt_oss", num_local_experts=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"; set --model\.attention eager$"):
        build_model(ModelSection(path=str(tmp_path), weights="random", attention="sdpa"), seed=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 10**9}, "model.layers = 1000000000 must lie in [1, 4096]"),
        ({"hidden_size": 10**12}, "model.hidden_size = 1000000000000 must lie in"),
        ({"intermediate_size": 10**18}, "model.intermediate_size = 1000000000000000000 must lie in"),
    ],
    ids=str,
)
def test_a_size_beyond_every_model_is_refused_with_its_setting(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(ModelSection(**{"vocab_size": 32, **changes}), seed=0)
    assert said in str(caught.value)


@pytest.fixture
def lone_process() -> Iterator[None]:
    """End the process group that a command leaves behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.path", "/nope"], "model.path = '/nope' is not a Hugging Face model directory"),
        (["--model.vocab-size", "100000000000"], "model.vocab_size = '100000000000' (on the command line)"),
        (
            ["--model.vocab-size", "16000000", "--model.hidden-size", "8192"],
            "weight has [16000000, 8192], of vocab_size = 1",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_counted_is_said_in_a_sentence(flags: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        run_command(["memory", *flags])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# The files that from_pretrained takes.


def spread(folder: Path) -> list[str]:
    """Write the same model in shards of other values, with an index, in the place of the one file."""
    (folder / SINGLE).unlink()
    save(folder, max_shard_size="4KB")
    names = sorted(path.name for path in folder.glob("model-*.safetensors"))
    for name in names:
        save_file({key: value + 1 for key, value in load_file(folder / name).items()}, folder / name, {"format": "pt"})
    return names


def test_one_file_is_taken_before_an_index_and_its_shards_as_transformers_does(model: Path, tmp_path: Path) -> None:
    whole = (model / SINGLE).read_bytes()
    spread(model)
    assert torch.equal(first_norm(model), theirs(model))
    assert first_norm(model)[0] == 2, "the shards alone"
    (model / SINGLE).write_bytes(whole)
    assert torch.equal(first_norm(model), theirs(model))
    assert first_norm(model)[0] == 1, "the file before the stale index"


def test_an_index_of_absent_shards_beside_a_whole_file_is_no_obstacle(model: Path) -> None:
    whole = (model / SINGLE).read_bytes()
    for name in spread(model):
        (model / name).unlink()
    (model / SINGLE).write_bytes(whole)
    assert torch.equal(first_norm(model), theirs(model))


def test_a_shard_that_the_index_does_not_name_is_not_read(model: Path) -> None:
    spread(model)
    (model / "model-00099-of-00099.safetensors").write_bytes(b"of another model")
    assert torch.equal(first_norm(model), theirs(model))


def test_an_adapter_beside_the_weights_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: from_pretrained adds an adapter to these weights" in refusal(model)


# Files outside.


def rename_shard(folder: Path, name: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../outside.safetensors", "x/../../outside.safetensors", "ABSOLUTE", "", "a\0b"])
def test_an_index_names_files_within_its_folder_only(model: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(model / SINGLE, tmp_path / "outside.safetensors")
    spread(model)
    name = str(tmp_path / "outside.safetensors") if name == "ABSOLUTE" else name
    rename_shard(model, name)
    assert refusal(model) == f"{model / INDEX} names {name}, not a name within the folder"


def link(folder: Path, name: str, target: Path) -> None:
    shutil.move(folder / name, target)
    (folder / name).symlink_to(target)


@pytest.mark.parametrize("name", [SINGLE, "config.json"])
def test_a_link_out_of_the_folder_is_refused_by_name(model: Path, tmp_path: Path, name: str) -> None:
    link(model, name, tmp_path / "elsewhere")
    answer = refusal(model)
    assert name in answer
    assert f"a link that leads out of the folder, to {tmp_path / 'elsewhere'}" in answer


def test_links_within_the_folder_and_a_link_to_the_folder_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "files").mkdir()
    link(model, SINGLE, model / "files" / "weights")
    (tmp_path / "name").symlink_to(model, target_is_directory=True)
    assert torch.equal(first_norm(tmp_path / "name"), theirs(model))


def test_a_snapshot_of_the_hugging_face_cache_is_links_to_blobs(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--some--model"
    snapshot = cache / "snapshots" / "0123abcd"
    (cache / "blobs").mkdir(parents=True)
    shutil.copytree(model, snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, cache / "blobs" / str(number))
        file.symlink_to(os.path.relpath(cache / "blobs" / str(number), snapshot))
    assert torch.equal(first_norm(snapshot), theirs(model))


# Quantised weights.


def rewrite(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, NORM: change(tensors[NORM])}, folder / SINGLE, {"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "spelling"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.int64, "I64")]
)
def test_quantised_numbers_under_plain_names_are_refused(model: Path, dtype: torch.dtype, spelling: str) -> None:
    rewrite(model, lambda weight: weight.to(dtype))
    assert f"{model / SINGLE}: {NORM} is {spelling}, quantised" in refusal(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_plain_numbers_of_any_width_are_read(model: Path, dtype: torch.dtype) -> None:
    rewrite(model, lambda weight: weight.to(dtype))
    assert first_norm(model).dtype == dtype
