"""The model: cut anywhere it keeps its names and its numbers; weights that do not fit are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, T5Config

from femto_core.architecture import build_model
from femto_core.batch import Batch, plain_positions
from femto_core.buckets import backward_order
from femto_core.errors import UserError
from femto_core.layout import Box
from femto_core.loss import ChunkedStatistics, CrossEntropy
from femto_core.mesh import Mesh
from femto_core.model import FullModel, Stage
from femto_core.sections import ModelSection
from femto_core.weights import RandomWeights, SafetensorsWeights
from femto_ops.hugging_face import INDEX, SINGLE
from femto_tools.testing import TINY, RandomRows, RandomTask, stack_batches
from tests.models import tiny_config

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYERS, VOCAB = 3, TINY["model"]["vocab_size"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def section(**changes: Any) -> ModelSection:
    return ModelSection(**{**TINY["model"], "layers": LAYERS, "tied": False, **changes})


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """Weights are drawn wide, so that logits, and with them the loss, depend on each of them."""
    return tiny_config(family, **{"num_hidden_layers": LAYERS, "initializer_range": 0.4, **changes})


def hugging_face(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(5)
    make: Any = AutoModelForCausalLM.from_config
    model: Any = make(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # transformers starts them at 1 and 0, which would hide mistakes
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


class OneRank:
    """As much of a mesh as a stage asks for."""

    data_axes = ("dp",)


ONE_RANK = cast("Mesh", OneRank())


def cut(full: FullModel, layers: range) -> Stage:
    ends = {"first": layers.start == 0, "last": layers.stop == full.config.num_hidden_layers}
    return Stage(full, [layers], ONE_RANK, frozenset({"dp"}), **ends)


def ready(full: FullModel, layers: range | None = None, dtype: torch.dtype = torch.float64) -> Stage:
    stage = cut(full, range(full.config.num_hidden_layers) if layers is None else layers)
    stage.allocate(CPU, lambda _: dtype)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            [values] = full.weights.read(stage.layouts[name].name, stage.layouts[name].owned())
            parameter.copy_(values)
    stage.train(False)
    return stage


def batch(rows: int = 3, documents: int = 1, seq_len: int = 8) -> Batch:
    task = RandomTask(documents=documents, rows=rows)
    data = RandomRows(task, seq_len, VOCAB, 0)
    return stack_batches([data[i] for i in range(rows)])


def logits(stage: Stage, of: Batch) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = stage.head(stage.forward(of.input_ids, of))
    return values


# Stages.


RANGES = [range(a, b) for a in range(LAYERS) for b in range(a + 1, LAYERS + 1)]


@pytest.mark.parametrize("layers", RANGES, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_has_the_hugging_face_names_of_its_range_and_no_others(family: str, tied: bool, layers: range) -> None:
    full = build_model(section(family=family, tied=tied), seed=0)
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        shapes = {n: tuple(p.shape) for n, p in make(full.config).named_parameters(remove_duplicate=False)}
    expected = {n for n in shapes if n.startswith(tuple(f"model.layers.{i}." for i in layers))}
    if layers.start == 0:
        expected |= {EMBEDDING}
    if layers.stop == LAYERS:
        expected |= {"model.norm.weight", HEAD}
    if tied and len(layers) == LAYERS:
        expected -= {HEAD}
    stage = cut(full, layers)
    assert {name: tuple(p.shape) for name, p in stage.named_parameters()} == {n: shapes[n] for n in expected}
    assert stage.layouts.keys() == expected
    assert [name for name, _ in stage.named_layers()] == [f"model.layers.{i}" for i in layers]
    assert (stage.first, stage.last) == (layers.start == 0, layers.stop == LAYERS)
    for name, layout in stage.layouts.items():
        assert layout.name == (EMBEDDING if tied and name == HEAD else name)
        assert layout.global_shape == shapes[name] == layout.box.sizes
        assert layout.replicated == layout.partial == {"dp"}
        assert layout.cut == layout.sharded == frozenset()
        assert layout.primary is not (tied and name == HEAD)
        assert layout.tied == (EMBEDDING if tied and name in (EMBEDDING, HEAD) else "")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_compute_what_the_whole_does(family: str, tied: bool) -> None:
    full = build_model(section(family=family, tied=tied), seed=3)
    check_cuts(full)


def check_cuts(full: FullModel) -> None:
    of = batch(documents=2)
    expected = logits(ready(full), of)
    count = full.config.num_hidden_layers
    for cut in range(1, count):
        with torch.no_grad():
            hidden = ready(full, range(cut)).forward(of.input_ids, of)
            last = ready(full, range(cut, count))
            assert torch.equal(last.head(last.forward(hidden, of)), expected), f"cut before layer {cut}"


def test_layers_of_different_kinds_keep_theirs_in_a_stage(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = config_of("qwen2", use_sliding_window=True, sliding_window=2, max_window_layers=1, layer_types=kinds)
    hugging_face(config).save_pretrained(tmp_path)
    check_cuts(build_model(section(path=str(tmp_path)), seed=0))


def test_cutting_a_stage_leaves_the_full_model_whole() -> None:
    full = build_model(section(), seed=0)
    before = [name for name, _ in full.module.named_parameters()]
    ready(full, range(1, 2))
    assert [name for name, _ in full.module.named_parameters()] == before
    assert {p.device.type for p in full.module.parameters()} == {"meta"}


@pytest.mark.parametrize("tied", [True, False])
def test_new_parameters_stay_tied_where_the_old_ones_were(tied: bool) -> None:
    stage = ready(build_model(section(tied=tied), seed=0))
    assert (stage.module.lm_head.weight is stage.body.embed_tokens.weight) is tied
    seen = []

    def make(name: str, old: nn.Parameter) -> nn.Parameter:
        seen.append(name)
        return nn.Parameter(old.detach() * 2, requires_grad="norm" in name)

    names = [name for name, _ in stage.named_parameters()]
    stage.replace_parameters(make)
    assert seen == names == [name for name, _ in stage.named_parameters()]
    assert (stage.module.lm_head.weight is stage.body.embed_tokens.weight) is tied
    assert {p.requires_grad for n, p in stage.named_parameters() if "norm" not in n} == {False}


def test_a_layer_in_a_layers_place_is_used() -> None:
    class Nothing(nn.Module):
        def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
            return hidden

    stage = ready(build_model(section(), seed=0))
    for name, _ in list(stage.named_layers()):
        stage.set_layer(name, Nothing())
    of = batch()
    with torch.no_grad():
        embedded = stage.body.norm(stage.body.embed_tokens(of.input_ids))
        assert torch.equal(stage.forward(of.input_ids, of), embedded)


# Buffers.


def test_rotary_frequencies_equal_the_formula_after_the_meta_device() -> None:
    stage = ready(build_model(section(hidden_size=64), seed=0))
    formula = torch.tensor([10000.0 ** (-i / 16) for i in range(0, 16, 2)])
    torch.testing.assert_close(stage.body.rotary_emb.inv_freq, formula, rtol=1e-6, atol=0)
    assert stage.body.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_scaled_rotary_frequencies_are_transformers_own(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = config_of("llama", rope_parameters=rope, max_position_embeddings=256, head_dim=8)
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path)
    stage = ready(build_model(section(path=str(tmp_path)), seed=0), dtype=torch.float32)
    expected = dict(theirs.model.rotary_emb.named_buffers())
    assert expected.keys() == dict(stage.body.rotary_emb.named_buffers()).keys()
    for name, buffer in stage.body.rotary_emb.named_buffers():
        assert torch.equal(buffer, expected[name])
    of = batch(seq_len=24)
    torch.testing.assert_close(logits(stage, of), theirs(of.input_ids).logits.detach(), rtol=1e-4, atol=1e-5)


def test_a_buffer_that_nobody_can_compute_is_refused_by_name() -> None:
    full = build_model(section(), seed=0)
    full.module.model.layers[1].mlp.register_buffer("thresholds", torch.ones(3), persistent=False)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp.*thresholds.*not supported"):
        cut(full, range(LAYERS)).allocate(CPU, lambda _: torch.float32)


# Architectures that do not fit.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 3}, ("model.heads = 3", "hidden_size = 16")),
        ({"heads": 16, "kv_heads": 16}, ("model.heads = 16", "even width")),
        ({"heads": 4, "kv_heads": 3}, ("model.kv_heads = 3", "model.heads = 4")),
        ({"path": "/no/such/place"}, ("/no/such/place", "no config.json")),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        build_model(section(**changes), seed=0)
    assert all(word in str(caught.value) for word in words), caught.value


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_model(section(path=str(path)), seed=0)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.25}),
        ("cohere2", {}),
        ("phimoe", {"lm_head_bias": True, "num_local_experts": 2}),
    ],
)
def test_a_model_that_does_more_with_its_logits_is_refused(tmp_path: Path, family: str, changes: Any) -> None:
    """Its own loss is another than that of hidden states times a matrix, and nothing would show it."""
    config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"ForCausalLM does more with its logits"):
        build_model(section(path=str(tmp_path), weights="random"), seed=0)


def test_scaled_embeddings_are_right_in_one_piece_and_refused_in_two(tmp_path: Path) -> None:
    config = config_of("granite", embedding_multiplier=3.0, logits_scaling=1.0)
    model = hugging_face(config, torch.float64)
    model.save_pretrained(tmp_path)
    full = build_model(section(path=str(tmp_path)), seed=0)
    of = batch()
    with torch.no_grad():
        expected = model(input_ids=of.input_ids, position_ids=of.position_ids).logits
    # transformers' norms are in fp32 whatever comes in
    torch.testing.assert_close(logits(ready(full), of), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match=r"GraniteModel changes its embeddings, so that it cannot be cut into stages"):
        cut(full, range(1))


@pytest.mark.parametrize("family", ["nemotron", "stablelm", "starcoder2", "olmo2", "llama"])
def test_chunks_run_their_own_layers_in_models_that_iterate_and_in_models_that_slice(
    tmp_path: Path, family: str
) -> None:
    hugging_face(config_of(family), torch.float64).save_pretrained(tmp_path)
    full = build_model(section(path=str(tmp_path)), seed=0)
    of = batch()
    expected = logits(ready(full), of)
    chunked = Stage(full, [range(1), range(1, LAYERS)], ONE_RANK, frozenset({"dp"}))
    chunked.allocate(CPU, lambda _: torch.float64)
    with torch.no_grad():
        for name, parameter in chunked.named_parameters():
            [values] = full.weights.read(chunked.layouts[name].name, chunked.layouts[name].owned())
            parameter.copy_(values)
        chunked.train(False)
        hidden = chunked.forward(chunked.forward(of.input_ids, of, 0), of, 1)
        assert torch.equal(chunked.head(hidden), expected)


def test_a_model_without_the_llama_anatomy_is_refused(tmp_path: Path) -> None:
    GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32).save_pretrained(tmp_path)
    refused(tmp_path, "GPT2LMHeadModel", "embed_tokens", "Llama")


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)
    refused(tmp_path, "t5")


@pytest.mark.parametrize(
    "text", ["", "{", "{}", '{"model_type": "no such model"}', '{"hidden_size": 3}'], ids=lambda text: text or "empty"
)
def test_a_config_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, str(tmp_path / "config.json"))


# Numbers.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_from_sizes_has_transformers_own_loss(family: str, tied: bool) -> None:
    full = build_model(section(family=family, tied=tied), seed=1)
    stage = ready(full, dtype=torch.float32)
    make: Any = AutoModelForCausalLM.from_config
    theirs = make(full.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(20 * parameter if parameter.dim() > 1 else parameter + torch.rand(parameter.shape))
            theirs.get_parameter(name).copy_(parameter)
    check_loss(stage, theirs)


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_has_transformers_own_loss(tmp_path: Path, family: str, tied: bool, shards: int) -> None:
    theirs = hugging_face(config_of(family, tie_word_embeddings=tied))
    theirs.save_pretrained(tmp_path, max_shard_size="4KB" if shards > 1 else "1GB")
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) >= shards) if shards > 1 else [file.name for file in files] == [SINGLE]
    assert (tmp_path / INDEX).exists() is (shards > 1)
    full = build_model(section(path=str(tmp_path)), seed=0)
    assert full.tied is tied
    stage = ready(full, dtype=torch.float32)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name
    check_loss(stage, theirs)


def check_loss(stage: Stage, theirs: Any) -> None:
    of = batch(rows=4)
    with torch.no_grad():
        ours = CrossEntropy()(ChunkedStatistics(), stage.forward(of.input_ids, of), stage.head, of)
        wanted = F.cross_entropy(theirs(of.input_ids).logits.flatten(0, 1), of.targets.flatten(), reduction="sum")
        chance = F.cross_entropy(torch.zeros(of.targets.numel(), VOCAB), of.targets.flatten(), reduction="sum")
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert abs(ours.item() / chance.item() - 1) > 0.05, "a loss at chance would not depend on the weights"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_document_moves_another_by_one_bit(family: str, attention: str) -> None:
    full = build_model(section(family=family, attention=attention), seed=0)
    stage = ready(full, dtype=torch.float32)
    of = batch(rows=2, documents=3, seq_len=12)
    before = logits(stage, of)
    document_ids = (of.position_ids == 0).cumsum(dim=1) - 1
    for document in range(3):
        inside = document_ids == document
        other_ids = torch.where(inside, (of.input_ids + 1) % VOCAB, of.input_ids)
        after = logits(stage, attrs.evolve(of, input_ids=other_ids))
        assert torch.equal(before[~inside], after[~inside])
        assert not torch.isclose(before[inside], after[inside]).all(dim=-1).any()


def test_documents_of_one_token_are_alone_too() -> None:
    stage = ready(build_model(section(), seed=0))
    ids = torch.arange(6)[None]
    alone = Batch(input_ids=ids, targets=ids, position_ids=torch.zeros_like(ids))
    columns = [
        logits(
            stage,
            Batch(input_ids=ids[:, i : i + 1], targets=ids[:, i : i + 1], position_ids=plain_positions(1, 1)),
        )
        for i in range(6)
    ]
    torch.testing.assert_close(logits(stage, alone), torch.cat(columns, dim=1), rtol=1e-12, atol=1e-14)


# Random weights.


def whole(shape: torch.Size) -> list[Box]:
    return [Box((0,) * len(shape), tuple(shape))]


def random_weights(seed: int, order: int = 1, family: str = "qwen2") -> dict[str, torch.Tensor]:
    full = build_model(section(family=family), seed=seed)
    shapes = {name: p.shape for name, p in full.module.named_parameters()}
    return {name: full.weights.read(name, whole(shapes[name]))[0] for name in list(shapes)[::order]}


def test_random_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = random_weights(7)
    torch.manual_seed(2)
    torch.rand(3)
    state = torch.get_rng_state()
    again = random_weights(7, order=-1)
    assert torch.equal(torch.get_rng_state(), state), "drawing weights must not move the global generator"
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = random_weights(8)
    matrices = [name for name in first if first[name].dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    for name in matrices:
        assert first[name].std().item() == pytest.approx(0.02, rel=0.2)
        assert abs(first[name].mean().item()) < 0.005
    for one in matrices:
        twins = [n for n in matrices if n != one and first[n].shape == first[one].shape]
        assert not any(torch.equal(first[one], first[n]) for n in twins), f"{one} is a copy of another"
    assert all((first[name] == 1).all() for name in first if "norm" in name)
    assert all((first[name] == 0).all() for name in first if name.endswith("bias"))


def test_a_box_of_random_weights_is_cut_out_of_the_whole() -> None:
    full = build_model(section(), seed=0)
    assert isinstance(full.weights, RandomWeights)
    [everything] = full.weights.read(EMBEDDING, whole(torch.Size((VOCAB, 16))))
    boxes = [Box((3, 2), (4, 5)), Box((0, 15), (32, 1))]
    parts = full.weights.read(EMBEDDING, boxes)
    assert torch.equal(parts[0], everything[3:7, 2:7])
    assert torch.equal(parts[1], everything[:, 15:])
    assert full.weights.read(EMBEDDING, []) == []


def test_the_shape_of_a_saved_model_can_start_from_random_weights(tmp_path: Path) -> None:
    config_of("qwen3", initializer_range=0.02).save_pretrained(tmp_path)
    refused(tmp_path, str(tmp_path), "no weights", "--model.weights random")
    full = build_model(section(path=str(tmp_path), weights="random"), seed=4)
    assert isinstance(full.weights, RandomWeights)
    assert full.config.model_type == "qwen3"
    ready(full)


# Weight files.


Change = Callable[[dict[str, torch.Tensor]], object]


def saved(folder: Path, change: Change = lambda _: None, tied: bool = False) -> Path:
    """A model in one file, its tensors changed by `change` before they are written."""
    config = config_of("llama", tie_word_embeddings=tied)
    model = hugging_face(config)
    config.save_pretrained(folder)
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    change(tensors)
    save_file(tensors, folder / SINGLE)
    return folder


def sharded(folder: Path) -> list[Path]:
    hugging_face(config_of("llama")).save_pretrained(folder, max_shard_size="4KB")
    return sorted(folder.glob("*.safetensors"))


def add(name: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_parameter_is_refused_by_name(tmp_path: Path) -> None:
    refused(saved(tmp_path, lambda t: t.pop(NORM)), str(tmp_path), "lacks 1 of", NORM)


def test_an_unexpected_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = "model.layers.3.input_layernorm.weight"
    refused(saved(tmp_path, add(extra, torch.ones(16))), str(tmp_path), "holds 1 tensor", extra)


@pytest.mark.parametrize("shape", [(15,), (16, 1), (17,), ()], ids=str)
def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    refused(saved(tmp_path, add(NORM, torch.ones(shape))), NORM, str(shape), "(16,)")


def test_a_wrong_prefix_is_refused_and_the_nearest_name_shown(tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "module.model.")] = tensors.pop(name)

    refused(saved(tmp_path, rename), "lacks", EMBEDDING, "did you mean 'module.model.embed_tokens.weight'")


def test_frequencies_saved_by_older_transformers_are_no_surplus(tmp_path: Path) -> None:
    saved(tmp_path, add("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)))
    build_model(section(path=str(tmp_path)), seed=0)


@pytest.mark.parametrize("keep", [0, 4, 100, 3000, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    file = saved(tmp_path) / SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    refused(tmp_path, str(file), "damaged or truncated")


def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    (saved(tmp_path) / SINGLE).write_text("version https://example.org/large-file\nsize 12345\n" * 20)
    refused(tmp_path, str(tmp_path / SINGLE), "damaged or truncated")


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path) -> None:
    shard = sharded(tmp_path)[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(tmp_path, str(shard), "damaged or truncated")


def test_an_absent_shard_is_refused_by_name(tmp_path: Path) -> None:
    shard = sharded(tmp_path)[2]
    shard.unlink()
    refused(tmp_path, str(tmp_path / INDEX), shard.name, "not there")


def test_a_shard_with_fewer_tensors_than_the_index_says_is_refused(tmp_path: Path) -> None:
    shard = sharded(tmp_path)[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file({**tensors}, shard)
    refused(tmp_path, "lacks 1 of", name)


def test_a_tensor_in_two_shards_is_refused_by_name(tmp_path: Path) -> None:
    first, second, *_ = sharded(tmp_path)
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: value + 1}, second)
    refused(tmp_path, name, first.name, second.name)


@pytest.mark.parametrize(
    "index",
    ["", "{", "[]", "{}", "3", '"text"', "null", '{"weight_map": []}', '{"weight_map": {"a": 3, "b": "c"}}', "\xff"],
    ids=lambda text: ascii(text),
)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, index: str) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_bytes(index.encode("latin-1"))
    refused(tmp_path, str(tmp_path / INDEX), "damaged")


def test_an_index_that_names_nothing_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {}}))
    refused(tmp_path, "lacks")


def test_a_tied_weight_saved_twice_alike_is_one_weight(tmp_path: Path) -> None:
    saved(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING].clone()}), tied=True)
    full = build_model(section(path=str(tmp_path)), seed=0)
    assert full.tied
    ready(full)


def test_a_tied_weight_saved_twice_differently_is_refused(tmp_path: Path) -> None:
    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1e-6

    refused(saved(tmp_path, differ, tied=True), HEAD, EMBEDDING, "tie_word_embeddings")


def test_a_second_copy_of_a_tied_weight_with_one_row_more_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, lambda t: t.update({HEAD: torch.cat([t[EMBEDDING], torch.ones(1, 16)])}), tied=True)
    refused(tmp_path, HEAD, f"({VOCAB + 1}, 16)", f"({VOCAB}, 16)")


def test_boxes_of_a_file_are_read_alone(tmp_path: Path) -> None:
    full = build_model(section(path=str(saved(tmp_path))), seed=0)
    assert isinstance(full.weights, SafetensorsWeights)
    everything = load_file(tmp_path / SINGLE)[EMBEDDING]
    parts = full.weights.read(EMBEDDING, [Box((3, 2), (4, 5)), Box((31, 0), (1, 16))])
    assert torch.equal(parts[0], everything[3:7, 2:7])
    assert torch.equal(parts[1], everything[31:])


# The order in which gradients come.


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_stand_in_the_order_of_backward_with_a_layers_vectors_behind_them(family: str, tied: bool) -> None:
    """A bucket that begins with a layer's first norm, whose gradient is the layer's last, waits for the whole layer."""
    stage = ready(build_model(section(family=family, tied=tied), seed=0))
    order, parameters = backward_order(stage), dict(stage.named_parameters())
    came: list[str] = []
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))  # type: ignore[no-untyped-call]
    stage.head(stage.forward(batch().input_ids, batch())).sum().backward()
    assert sorted(order) == sorted(came)
    layer = [name.removeprefix("model.layers.").partition(".")[0] for name in order if ".layers." in name]
    assert layer == sorted(layer, key=int, reverse=True)
    for number in range(LAYERS):
        mine = [name for name in order if f".layers.{number}." in name]
        matrices = [name for name in mine if parameters[name].ndim > 1]
        assert mine[: len(matrices)] == matrices
        last = max(came.index(name) for name in matrices)
        assert came.index(f"model.layers.{number}.input_layernorm.weight") > last, "else the order could be simpler"
