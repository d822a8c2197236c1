"""Inputs and outputs of sharded runs: initial weights, checkpoints, exports, Hugging Face files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from femto_checkpoint.export import export
from femto_checkpoint.options import ExportConfig
from femto_core import weights
from femto_core.trainer import Trainer
from femto_report.samples import continue_tokens
from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, make_trainer, train_job, worst_difference
from tests.tp.tools import Values, merged, tp, train_tp

LAYOUTS = [(1, 1, False), (2, 1, False), (4, 1, True), (2, 2, True)]


def settings(folder: Path, resume: str = "none", *, family: str = "qwen3", tied: bool = True) -> Values:
    return {
        "run": {"dir": str(folder)},
        "checkpoint": {"resume": resume},
        "train": {"steps": 6},
        "model": {"family": family, "tied": tied, "vocab_size": 37},
        "data": {"micro_batch": 4},
    }


def build(values: Values) -> Trainer:
    return make_trainer(values, ["tp"] if "tp" in values else [])


def train_on(values: Values, first: int, last: int, save: bool) -> dict[str, Any]:
    """Train from step `first` to `last`; return this rank's part of a record, optimizer state included."""
    trainer = build(values)
    assert trainer.step == first
    infos = [trainer.train_step() for _ in range(first, last)]
    if save:
        trainer.save()
        trainer.checkpointer.wait()
    state = {g.name: g.master.detach().clone() for g in trainer.shares}
    layouts = {g.name: g.layout for g in trainer.shares}
    moments: dict[str, torch.Tensor] = {}
    for group in trainer.shares:
        if group.master in trainer.optimizer.state:
            moments[group.name] = trainer.optimizer.state[group.master]["exp_avg"].clone()
    held_out = trainer.evaluate()
    trainer.close()
    return {
        "losses": [*(info.loss for info in infos), held_out],
        "norms": [info.grad_norm for info in infos],
        "layouts": layouts,
        "gradients": [moments],
        "weights": state,
    }


@pytest.fixture(scope="module")
def straight(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Run steps 1 to 3, then 4 to 6, in one process."""
    folder = tmp_path_factory.mktemp("straight")
    pool.run(1, train_on, settings(folder), 0, 3, True)
    return assemble(pool.run(1, train_on, settings(folder, "auto"), 3, 6, False))


@pytest.fixture(scope="module", params=[(2, 1, False), (4, 1, True)], ids=["of tp 2", "of tp 4, replicas"])
def cut_short(request: pytest.FixtureRequest, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size, dp, sequence_parallel = request.param
    folder: Path = tmp_path_factory.mktemp("cut-short")
    pool.run(size * dp, train_on, merged(settings(folder), tp(size, sequence_parallel)), 0, 3, True)
    return folder


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("size", "dp", "sequence_parallel"), LAYOUTS)
def test_a_checkpoint_resumes_under_any_other_layout(
    pool: WorkerPool, straight: Record, cut_short: Path, size: int, dp: int, sequence_parallel: bool
) -> None:
    values = settings(cut_short, str(cut_short / "test" / "checkpoints" / "step-3"))
    values = merged(values, {"run": {"dir": str(cut_short / f"{size}-{dp}-{sequence_parallel}")}})
    if size > 1:
        values = merged(values, tp(size, sequence_parallel))
    resumed = assemble(pool.run(size * dp, train_on, values, 3, 6, False))
    assert len(resumed.losses) == len(straight.losses) == 4
    assert worst_difference(straight, resumed) < 1e-9


# Exports and loading.


def saved_weights(values: Values) -> dict[str, Any]:
    """Export initial weights, which are the same under every layout."""
    trainer = build(values)
    trainer.save()
    trainer.checkpointer.wait()
    part: dict[str, Any] = {"layouts": {g.name: g.layout for g in trainer.shares}}
    part["weights"] = {g.name: g.master.detach().clone() for g in trainer.shares}
    part.update(losses=[], norms=[], gradients=[])
    trainer.close()
    return part


def exported(pool: WorkerPool, folder: Path, values: Values, world: int) -> tuple[Record, Path]:
    record = assemble(pool.run(world, saved_weights, values))
    export(folder / "test" / "checkpoints" / "step-0", ExportConfig(output=str(folder / "out"), dtype="float32"))
    return record, folder / "out"


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False)])
def test_exports_and_initial_weights_do_not_depend_on_the_layout(
    pool: WorkerPool, tmp_path: Path, family: str, tied: bool
) -> None:
    """Bits are equal; a vocabulary of 37 stays 37, and a tied weight is stored once."""
    one, out = exported(pool, tmp_path / "one", settings(tmp_path / "one", family=family, tied=tied), 1)
    wanted, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    for size, sequence_parallel in ((2, False), (4, True)):
        folder = tmp_path / f"tp{size}"
        values = merged(settings(folder, family=family, tied=tied), tp(size, sequence_parallel))
        many, out = exported(pool, folder, values, size)
        assert one.weights.keys() == many.weights.keys()
        assert all(torch.equal(value, many.weights[name]) for name, value in one.weights.items())
        found = load_file(out / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(value, found[name]) for name, value in wanted.items())
        assert found["model.embed_tokens.weight"].shape == (37, 16)
        assert ("lm_head.weight" in found) is not tied
        assert json.loads((out / "config.json").read_text()) == config


def read_boxes(values: Values) -> dict[str, list[tuple[int, ...]]]:
    """Return the sizes that were read from safetensors, by parameter."""
    right = weights.SafetensorsWeights.read
    read: dict[str, list[tuple[int, ...]]] = {}

    def listening(self: Any, name: str, boxes: Any) -> list[torch.Tensor]:
        found = right(self, name, boxes)
        read[name] = [tuple(tensor.shape) for tensor in found]
        return found

    weights.SafetensorsWeights.read = listening  # type: ignore[method-assign]
    try:
        build(values).close()
    finally:
        weights.SafetensorsWeights.read = right  # type: ignore[method-assign]
    return read


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_hugging_face_directory_is_read_in_slices(pool: WorkerPool, tmp_path: Path, tied: bool) -> None:
    one, out = exported(pool, tmp_path / "one", settings(tmp_path / "one", family="qwen2", tied=tied), 1)
    loading = merged(settings(tmp_path / "new"), {"model": {"path": str(out)}})
    trained = assemble(pool.run(1, train_tp, merged(loading, {"run": {"name": "a"}})))
    for size, sequence_parallel in ((2, True), (4, False)):
        cut = merged(loading, tp(size, sequence_parallel), {"run": {"name": f"tp{size}"}})
        many = assemble(pool.run(size, train_tp, cut))
        assert worst_difference(trained, many) < 1e-9
        for rank, read in enumerate(pool.run(size, read_boxes, merged(cut, {"run": {"name": f"read{size}"}}))):
            rows = 37 // size + (rank < 37 % size)
            assert read["model.embed_tokens.weight"] == [(rows, 16)]
            assert read["model.layers.0.mlp.down_proj.weight"] == [(16, 24 // size)]
            assert read["model.layers.0.self_attn.q_proj.bias"] == [(16 // size,)]
            assert read["model.layers.1.self_attn.k_proj.weight"] == [(8 // min(size, 2), 16)]
            assert ("lm_head.weight" in read) is not tied
    assert one.weights.keys() == trained.weights.keys()


def test_what_tp_exports_tp_loads_with_a_vocabulary_that_is_still_37(pool: WorkerPool, tmp_path: Path) -> None:
    """Export, load and export again: no export is padded."""
    values = merged(settings(tmp_path / "a"), tp(4))
    _, out = exported(pool, tmp_path / "a", values, 4)
    loading = merged(settings(tmp_path / "b"), tp(2), {"model": {"path": str(out)}})
    _, again = exported(pool, tmp_path / "b", loading, 2)
    first, second = (load_file(path / "model.safetensors") for path in (out, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert json.loads((again / "config.json").read_text())["vocab_size"] == 37


# Evaluation and sampling, of any length.


def outputs(values: Values) -> dict[str, Any]:
    """Return logits of rows of 1 to 8 tokens, sampled tokens, and the held-out loss; then train a step."""
    trainer = build(values)
    trainer.train_step()
    trainer.stage.train(False)
    batch, logits = trainer.dataset[3], []
    for length in (1, 2, 3, 5, 7, 8):
        cut = type(batch)(**{name: getattr(batch, name)[:, :length] for name in FIELDS})
        logits.append(trainer.schedule.forward(trainer.stage, cut, lambda hidden, head: head(hidden)))
    trainer.stage.train(True)
    sampled = continue_tokens(trainer, [3, 1, 4], count=6, temperature=0.7, seed=5, end_id=None)
    found = {"logits": logits, "sampled": sampled, "held_out": trainer.evaluate(), "after": trainer.train_step().loss}
    trainer.close()
    return found


FIELDS = ("input_ids", "targets", "position_ids")


@pytest.mark.parametrize(("size", "dp", "sequence_parallel"), LAYOUTS[1:])
def test_evaluation_and_sampling_take_rows_of_any_length(
    pool: WorkerPool, tmp_path: Path, size: int, dp: int, sequence_parallel: bool
) -> None:
    [one] = pool.run(1, outputs, settings(tmp_path / "one"))
    values = merged(settings(tmp_path / "many"), tp(size, sequence_parallel))
    for found in pool.run(size * dp, outputs, values):
        for mine, theirs in zip(one["logits"], found["logits"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        assert found["sampled"] == one["sampled"]
        assert found["held_out"] == pytest.approx(one["held_out"], rel=1e-9)
        assert found["after"] == pytest.approx(one["after"], rel=1e-9)


@pytest.mark.parametrize("vocab_size", [37, 3])
def test_whole_logits_are_of_the_whole_vocabulary(pool: WorkerPool, tmp_path: Path, vocab_size: int) -> None:
    words = {"model": {"vocab_size": vocab_size, "tied": False}}
    values = merged({"train": {"steps": 2}, "data": {"micro_batch": 4}}, words)
    one = assemble(pool.run(1, train_job, values, ()))
    many = assemble(pool.run(4, train_tp, merged(values, tp(4)), (), RandomTask()))
    assert one.weights["lm_head.weight"].shape == many.weights["lm_head.weight"].shape == (vocab_size, 16)
    assert worst_difference(one, many) < 1e-9
