"""Mixtures of experts as transformers saves them, an expert a tensor: loaded, trained, and exported as they came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from femto_checkpoint.export import export
from femto_checkpoint.options import ExportConfig
from femto_core.architecture import build_model
from femto_core.errors import UserError
from femto_core.layout import Box
from femto_core.sections import ModelSection
from femto_core.trainer import Trainer
from femto_ops.fused import replace_with_fused
from femto_tools.testing import make_trainer
from tests.checkpoint.runs import checkpoint_of, values
from tests.models import tiny_config

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe")
WEIGHTS = "model.safetensors"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def save(folder: Path, family: str, **options: Any) -> Path:
    """Write a model of 4 experts as save_pretrained does."""
    torch.manual_seed(3)
    known = tiny_config(family).to_dict()
    make: Any = AutoModelForCausalLM.from_config
    config = tiny_config(family, **{key: value for key, value in EXPERTS.items() if key in known})
    make(config).save_pretrained(folder, **options)
    return folder


def theirs(folder: Path) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(folder, output_loading_info=True, dtype=torch.float64, experts_implementation="eager")
    assert not any(report.values()), report
    replace_with_fused(model)  # its own norms compute in float32
    return model.eval()


def trainer_of(folder: Path, path: Path) -> Trainer:
    return make_trainer(values(folder, model={"path": str(path)}))


def compare_logits(trainer: Trainer, model: Any) -> None:
    """Hold femto's logits to transformers' at 1e-9, in float64."""
    batch = trainer.dataset[3]
    trainer.stage.train(False)
    ours = trainer.schedule.forward(trainer.stage, batch, lambda hidden, head: head(hidden))
    trainer.stage.train(True)
    with torch.no_grad():
        wanted = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_is_trained_from_its_files_and_exported_in_their_layout(
    world_of_one: None, tmp_path: Path, family: str
) -> None:
    source = save(tmp_path / "source", family)
    assert any(".experts.3." in key for key in load_file(source / WEIGHTS)) or family == "granitemoe"
    trainer = trainer_of(tmp_path / "run", source)
    compare_logits(trainer, theirs(source))
    before = {share.name: share.master.detach().clone() for share in trainer.shares}
    trainer.train_step()
    changed = [name for name, old in before.items() if not torch.equal(old, dict(masters(trainer))[name])]
    assert len(changed) == len(before)
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    export(checkpoint_of(tmp_path / "run", 1), ExportConfig(output=str(tmp_path / "out")))
    was, now = load_file(source / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert {key: value.shape for key, value in now.items()} == {key: value.shape for key, value in was.items()}
    again = trainer_of(tmp_path / "again", tmp_path / "out")
    for name, master in masters(again):
        assert torch.equal(master, dict(masters(trainer))[name].float().double()), "as exported, in float32"
    compare_logits(again, theirs(tmp_path / "out"))
    again.close()


def masters(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    return [(share.name, share.master.detach()) for share in trainer.shares]


def test_experts_fused_in_the_files_are_read_too(tmp_path: Path) -> None:
    apart, fused = save(tmp_path / "apart", "qwen3_moe"), tmp_path / "fused"
    load: Any = AutoModelForCausalLM.from_pretrained
    load(apart).save_pretrained(fused, save_original_format=False)
    assert FUSED in load_file(fused / WEIGHTS)
    assert torch.equal(*(fused_weight(folder, Box((0, 0, 0), (4, 16, 16))) for folder in (apart, fused)))


def fused_weight(folder: Path, box: Box) -> torch.Tensor:
    [found] = build_model(ModelSection(path=str(folder)), seed=0).weights.read(FUSED, [box])
    return found


def test_a_rank_reads_its_box_of_experts_that_lie_in_several_files(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3_moe", max_shard_size="3KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    whole = theirs(folder).get_parameter(FUSED)
    box = Box((1, 4, 0), (2, 7, 16))
    assert torch.equal(fused_weight(folder, box).double(), whole[1:3, 4:11])


EXPERT = "model.layers.1.mlp.experts.2.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"do not make {FUSED}: "),
        (
            lambda tensors: [tensors.pop(EXPERT.replace("gate", part)) for part in ("gate", "up")],
            f"{FUSED} has shape (3, 16, 16), but config.json asks for (4, 16, 16)",
        ),
        (lambda tensors: tensors.update({EXPERT: torch.zeros(8, 15)}), f"do not make {FUSED}: "),
        (lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.int8)}), f"{EXPERT} is I8, quantised"),
        (
            lambda tensors: [tensors.pop(key) for key in list(tensors) if ".1.mlp.experts." in key],
            f"first of them {FUSED}",
        ),
    ],
    ids=["a part of one", "one", "another shape", "quantised", "all of a layer"],
)
def test_experts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    folder = save(tmp_path, "qwen3_moe")
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError) as caught:
        build_model(ModelSection(path=str(folder)), seed=0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_buffer_in_the_files_is_named_as_what_it_is(tmp_path: Path) -> None:
    folder = save(tmp_path, "glm4_moe")
    with pytest.raises(UserError) as caught:
        build_model(ModelSection(path=str(folder)), seed=0)
    assert str(caught.value) == (
        f"{folder} holds model.layers.1.mlp.gate.e_score_correction_bias, a buffer of Glm4MoeForCausalLM, and femto "
        "trains and saves parameters only; this architecture is not supported"
    )
