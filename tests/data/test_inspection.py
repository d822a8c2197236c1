"""`femto data-inspect`: counts and rows as text; files that do not belong to their manifest are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from femto_core.errors import UserError
from femto_data.config import InspectConfig
from femto_data.dataset import PackedDataset
from femto_data.inspection import describe
from tests.data.making import run, texts

DOCUMENTS = ["The cat\nsat.", "second\x1b[31m\r document", "日本語", "tail of text\n\n"] * 3


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    run(tmp_path, texts(tmp_path / "docs.jsonl", *DOCUMENTS), seq_len=40, vocab_size=257, held_out=0.3)
    return tmp_path / "out"


def shown(directory: Path, **options: object) -> list[str]:
    return list(describe(InspectConfig(directory=str(directory), **options)))  # type: ignore[arg-type]


def test_rows_are_text_with_the_documents_ends_and_no_control_characters(dataset: Path) -> None:
    lines = shown(dataset, rows=(0, 1))
    train = PackedDataset(dataset / "train.safetensors")
    at = lines.index(f"row 0 of train (0 to {len(train) - 1}), 40 tokens and the next:")
    assert lines[at + 1 : at + 4] == ["  | The cat", "  | sat.", "  [end of document]"]
    assert lines[at + 4] == "  | second\\x1b[31m\\r document"
    assert "\x1b" not in "".join(lines)
    assert f"row 1 of train (0 to {len(train) - 1}), 40 tokens and the next:" in lines


def test_counts_come_from_the_manifest(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    lines = shown(dataset, rows=())
    for name in ("documents", "tokens", "rows_train", "rows_held_out", "vocab_size", "tokenizer"):
        assert f"{name.replace('_', ' '):<16} {manifest[name]}" in lines
    assert any(line.startswith(f"source {dataset.parent}/docs.jsonl: 12 documents, 0 empty, ") for line in lines)


def test_of_many_sources_the_first_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    run(tmp_path, *(texts(tmp_path / f"{i}.jsonl", "some text of a document") for i in range(20)))
    lines = shown(tmp_path / "out", rows=())
    assert sum(line.startswith("source ") for line in lines) == 12
    assert lines[-1] == "and 8 more sources, in manifest.json"


def test_held_out_rows_and_their_absence(dataset: Path, tmp_path: Path) -> None:
    assert any(line.startswith("row 0 of held_out") for line in shown(dataset, split="held_out"))
    run(tmp_path, tmp_path / "docs.jsonl", output=str(tmp_path / "other"))
    with pytest.raises(UserError, match="has no held-out rows"):
        shown(tmp_path / "other", split="held_out")


def test_a_row_that_is_not_there_is_refused(dataset: Path) -> None:
    with pytest.raises(UserError, match=r"there is no row 99: .*train.safetensors has rows 0 to"):
        shown(dataset, rows=(0, 99))


def test_the_check_finds_one_flipped_bit(dataset: Path) -> None:
    assert sum("rows match their digest" in line for line in shown(dataset, check=True)) == 2
    file = dataset / "train.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    shown(dataset)
    with pytest.raises(UserError, match=r"train.safetensors is damaged: its rows have digest"):
        shown(dataset, check=True)


def test_the_command_prints_it_and_refuses_with_one_sentence(dataset: Path) -> None:
    command = [sys.executable, "-m", "femto_core", "data-inspect"]
    done = subprocess.run(
        [*command, str(dataset), "--rows", "0", "1", "--split", "train"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == shown(dataset, rows=(0, 1))
    failed = subprocess.run([*command, str(dataset.parent)], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "manifest.json does not exist; give a directory that `femto preprocess` wrote" in failed.stderr
    assert "Traceback" not in failed.stderr


# Files that do not belong ---------------------------------------------------------------------------------------------


def other_rows(tmp_path: Path, **options: object) -> Path:
    """A file of rows from another run, of equal size."""
    documents = [document.replace("cat", "dog") for document in DOCUMENTS]
    run(
        tmp_path,
        texts(tmp_path / "others.jsonl", *documents),
        **{"seq_len": 40, "vocab_size": 257, "held_out": 0.3, "output": str(tmp_path / "other"), **options},
    )
    return tmp_path / "other/train.safetensors"


def test_rows_of_another_run_are_stale_even_at_the_same_size(tmp_path: Path, dataset: Path) -> None:
    other = other_rows(tmp_path)
    assert other.stat().st_size == (dataset / "train.safetensors").stat().st_size
    shutil.copy(other, dataset / "train.safetensors")
    with pytest.raises(UserError, match=r"train.safetensors is stale: the manifest beside it belongs to a file of"):
        PackedDataset(dataset / "train.safetensors")
    PackedDataset(dataset / "held_out.safetensors")


def test_a_held_out_file_that_an_earlier_run_left_is_stale(tmp_path: Path, dataset: Path) -> None:
    other = other_rows(tmp_path, held_out=0.0)
    shutil.copy(dataset / "held_out.safetensors", other.parent)
    with pytest.raises(UserError, match=r"held_out.safetensors is stale: the manifest beside it names no such file"):
        PackedDataset(other.parent / "held_out.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[:50], "manifest.json cannot be read"),
        (lambda text: "[]", "manifest.json is no manifest in the format femto-dataset-3"),
        (lambda text: text.replace("femto-dataset-3", "femto-dataset-1"), "is no manifest in the format"),
    ],
)
def test_rows_beside_a_damaged_manifest_are_refused(dataset: Path, spoil: Callable[[str], str], words: str) -> None:
    manifest = dataset / "manifest.json"
    manifest.write_text(spoil(manifest.read_text()))
    with pytest.raises(UserError, match=words):
        PackedDataset(dataset / "train.safetensors")


def test_rows_of_another_tokenizer_than_the_manifests_are_stale(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["tokenizer"] = "0" * 16
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is stale: its tokenizer is"):
        PackedDataset(dataset / "train.safetensors")
