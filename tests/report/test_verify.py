"""`femto verify`: a run's own settings and plugins, proven against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from femto_core.errors import UserError
from femto_tools.testing import Record
from femto_tools.verify import Difference, compare, print_differences, refusal_in, shrink
from tests.cli.commands import TINY_FLAGS, femto, install_plugin

SETTINGS = (*TINY_FLAGS, "--model.layers", "2", "--model.kv-heads", "2", "--train.steps", "9", "--model.no-tied")


def test_three_axes_are_proven_equal_and_all_parameters_listed(tmp_path: Path) -> None:
    words = ("verify", "--plugins", "tp,pp,bf16", "--nproc", "4", "--steps", "2", *SETTINGS)
    done = femto([*words, "--tp.size", "2", "--pp.size", "2"], tmp_path)
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("pp 2 x dp 1 x tp 2 against one process, 2 steps in float64\n")
    assert (
        "plugins in both runs: none; only in the distributed run: tp, pp, bf16\nbf16 computes in float64 here, too"
        in done.out
    )
    for name in ("loss", "gradient norm", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        assert f"\n{name}  " in done.out
    assert "\nequal within 1e-09: the largest difference is" in done.out
    assert "<--" not in done.out
    assert not (tmp_path / "runs").exists()


def test_tp_takes_the_size_that_it_would_take_on_this_machine(tmp_path: Path) -> None:
    done = femto(["verify", "--plugins", "tp", "--nproc", "2", "--steps", "1", *SETTINGS], tmp_path)
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("dp 1 x tp 2 against one process, 1 steps in float64\n")


@pytest.mark.parametrize(
    ("words", "axis"),
    [
        (["zero1", "--nproc", "1"], "dp"),
        (["tp,zero3", "--nproc", "2"], "dp"),
        (["pp", "--pp.size", "1", "--nproc", "2"], "pp"),
        (["tp", "--tp.size", "1", "--nproc", "2"], "tp"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else words,
)
def test_what_was_not_cut_is_not_called_equal(tmp_path: Path, words: list[str], axis: str) -> None:
    done = femto(["verify", "--steps", "1", "--plugins", *words, *SETTINGS], tmp_path)
    assert done.code == 1, done.out + done.err
    assert f"\nNOT PROVEN: there is one rank along {axis}, so nothing was cut or sharded" in done.out
    assert "equal within" not in done.out
    assert len(done.err.splitlines()) <= 1, done.err


def test_settings_of_a_run_that_goes_on_from_weights_and_reads_beside_training_are_no_obstacle(tmp_path: Path) -> None:
    words = ("--data.workers", "2", "--checkpoint.resume", str(tmp_path), "--checkpoint.weights-only")
    done = femto(["verify", "--plugins", "zero1", "--steps", "1", *SETTINGS, *words], tmp_path)
    assert done.code == 0, done.out + done.err


FAULTS = {
    "a layer that computes something else": (
        """
from femto_core.hookspecs import hookimpl
@hookimpl
def femto_wrap_layer(name, layer):
    if name.endswith("1"):
        layer.mlp.register_forward_hook(lambda module, inputs, output: output * 1.000001)
""",
        "differ by more than 1e-09; the first parameter in forward's order is model.embed_tokens.weight",
    ),
    "gradients that nobody sums": (
        """
from femto_core.hookspecs import hookimpl
@hookimpl
def femto_sharding(mesh):
    from femto_core.replicated import LocalSums, Replicated
    strategy = Replicated(mesh, 25.0)
    strategy._gradients = LocalSums()
    return strategy
""",
        "ranks hold different values of",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plugin_it_has_never_heard_of_is_found_out(tmp_path: Path, fault: str) -> None:
    source, words = FAULTS[fault]
    env = install_plugin(tmp_path / "site", "faulty", source)
    done = femto(["verify", "--plugins", "faulty", "--steps", "2", *SETTINGS], tmp_path, env)
    assert done.code == 1, done.out + done.err
    assert "\nDIFFERENT: " in done.out
    assert words in done.out


LOOKING_ON = """
import attrs
from femto_core.hookspecs import hookimpl
@attrs.frozen
class Section:
    loud: bool = True
@hookimpl
def femto_config_section():
    return "onlooker", Section
@hookimpl
def femto_step_end(info):
    raise RuntimeError("is not to be called")
"""


def test_a_plugin_that_only_looks_on_takes_part_in_neither(tmp_path: Path) -> None:
    env = install_plugin(tmp_path / "site", "onlooker", LOOKING_ON)
    done = femto(["verify", "--plugins", "onlooker,zero1", "--steps", "1", *SETTINGS], tmp_path, env)
    assert done.code == 0, done.out + done.err
    assert "plugins in both runs: none; only in the distributed run: zero1" in done.out


CONTENT = """
from femto_core.hookspecs import hookimpl
@hookimpl
def femto_loss():
    from femto_core.loss import CrossEntropy
    class Halved(CrossEntropy):
        def __call__(self, statistics, hidden, head, batch):
            return super().__call__(statistics, hidden, head, batch) * 0.5
    return Halved()
"""


def test_a_plugin_that_decides_what_is_computed_takes_part_in_both(tmp_path: Path) -> None:
    env = install_plugin(tmp_path / "site", "halved", CONTENT)
    done = femto(["verify", "--plugins", "halved,zero1", "--steps", "2", *SETTINGS], tmp_path, env)
    assert done.code == 0, done.out + done.err
    assert "plugins in both runs: halved; only in the distributed run: zero1" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nproc", "0"], "--nproc = '0' (on the command line): must be greater than 0"),
        (["--nproc", "some"], "--nproc = 'some' (on the command line): must be a whole number"),
        (["--hidden", "10", "--model.heads", "4"], "--hidden 10 does not cut into 4 heads of even width"),
        (["--nproc", "3", *SETTINGS], "data.global_batch = 4 is not a multiple of 3 data-parallel ranks"),
    ],
)
def test_what_cannot_be_verified_gets_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = femto(["verify", *words], tmp_path)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) == 1


def test_a_model_from_a_directory_is_shrunk_in_a_copy_of_its_config(tmp_path: Path) -> None:
    source, folder = tmp_path / "model", tmp_path / "small"
    source.mkdir()
    folder.mkdir()
    config: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 160}
    config |= {
        "num_attention_heads": 4,
        "attention_dropout": 0.1,
        "layer_types": ["full_attention"] * 6,
        "head_dim": 16,
    }
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    values: dict[str, dict[str, Any]] = {"model": {"path": str(source), "weights": "load"}}
    shrink(values, 2, 32, folder)
    assert values["model"] == {"path": str(folder), "weights": "random"}
    small = json.loads((folder / "config.json").read_text())
    assert (small["num_hidden_layers"], small["hidden_size"], small["intermediate_size"]) == (2, 32, 80)
    assert (small["attention_dropout"], len(small["layer_types"]), small["head_dim"]) == (0.0, 2, 8)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert json.loads((source / "config.json").read_text()) == config


def test_a_model_from_a_directory_keeps_its_weights_where_nothing_is_shrunk(tmp_path: Path) -> None:
    source, folder = tmp_path / "model", tmp_path / "small"
    source.mkdir()
    folder.mkdir()
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "resid_dropout": 0.1}))
    values: dict[str, dict[str, Any]] = {"model": {"path": str(source), "weights": "load"}}
    shrink(values, 0, 0, folder)
    assert values["model"]["weights"] == "load"
    assert json.loads((folder / "config.json").read_text()) == {"num_hidden_layers": 6, "resid_dropout": 0.0}
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        shrink({"model": {"path": str(tmp_path)}}, 0, 0, folder)


def record(**weights: float) -> Record:
    tensors = {name: torch.tensor([value, 1.0], dtype=torch.float64) for name, value in weights.items()}
    return Record(losses=[1.0], norms=[2.0], gradients=[tensors], weights=tensors)


def test_what_only_one_run_has_and_what_is_not_finite_differs() -> None:
    found = {d.what: d.worst for d in compare(record(a=1.0, b=2.0, c=3.0), record(a=1.0, b=float("nan"), d=3.0))}
    assert found == {
        "loss": 0.0,
        "gradient norm": 0.0,
        "a": 0.0,
        "b": float("inf"),
        "c": float("inf"),
        "d": float("inf"),
    }


def test_the_table_marks_what_differs_and_names_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Difference("loss", 1e-3, 0.0), Difference("gradient norm", 0.0, 0.0), Difference("a", 0.0, 1e-10)]
    assert print_differences(rows[1:]) == 0
    assert print_differences([*rows, Difference("b", float("nan"), 0.0), Difference("c", 0.0, 2e-9)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "DIFFERENT: 3 of 5 differ by more than 1e-09; the first parameter in forward's order is b"
    assert [line.split()[0] for line in lines if line.endswith("<--")] == ["loss", "b", "c"]


def test_a_refusal_inside_a_worker_is_found_in_its_traceback() -> None:
    text = "--- rank 1 ---\nTraceback (most recent call last):\n  File x\nfemto_core.errors.UserError: so it is\n"
    assert refusal_in(text) == "so it is"
    assert refusal_in("Traceback\nValueError: no") == ""
