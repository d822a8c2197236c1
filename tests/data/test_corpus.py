"""The standard library as a dataset: built once, by the first process, from sources only."""

from __future__ import annotations

import os
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from femto_core.errors import UserError
from femto_data import corpus
from femto_data.config import PreprocessConfig
from femto_data.corpus import standard_library_dataset, standard_library_sources
from femto_data.dataset import PackedDataset
from femto_data.manifest import Manifest
from femto_data.preprocess import preprocess

ROOT = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory, and a library of 150 short modules in the place of the standard one."""
    files = [tmp_path / f"module{i:03}.py" for i in range(150)]
    for i, file in enumerate(files):
        file.write_text(f"def function_{i}(x: int) -> int:\n    return x + {i}\n")
    monkeypatch.setattr(corpus, "standard_library_sources", lambda root: files)
    return tmp_path / "cache"


def test_the_whole_library_makes_a_dataset_in_seconds(tmp_path: Path) -> None:
    start = time.perf_counter()
    directory = standard_library_dataset(tmp_path / "deep/cache", seq_len=128, vocab_size=2048)
    assert time.perf_counter() - start < 25
    train, held_out = (PackedDataset(directory / f"{name}.safetensors") for name in ("train", "held_out"))
    assert train.vocab_size == 2048
    assert len(train) > 10_000
    assert 0 < len(held_out) < len(train) / 10


def test_the_second_call_makes_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = standard_library_dataset(small, seq_len=16, vocab_size=300)
    monkeypatch.setattr(corpus, "preprocess", None)
    assert standard_library_dataset(small, seq_len=16, vocab_size=300) == first


def test_other_settings_get_a_directory_of_their_own(small: Path) -> None:
    made = {standard_library_dataset(small, seq_len=s, vocab_size=v) for s, v in ((16, 300), (17, 300), (16, 301))}
    assert len(made) == 3
    assert all(path.name.startswith("stdlib-py3.") for path in made)


def test_calls_at_once_make_it_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(config: PreprocessConfig, *, quiet: bool) -> Manifest:
        calls.append(1)
        return preprocess(config, quiet=quiet)

    monkeypatch.setattr(corpus, "preprocess", counted)
    threads = [
        threading.Thread(target=standard_library_dataset, args=(small,), kwargs={"seq_len": 16, "vocab_size": 300})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_an_interrupted_call_leaves_no_directory_and_the_next_call_makes_it(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.replace

    def killed(old: Path, new: Path) -> None:
        if Path(new).name.startswith("stdlib"):
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            standard_library_dataset(small, seq_len=16, vocab_size=300)
    assert not [path for path in small.iterdir() if not path.name.startswith(".") and path.suffix != ".lock"]
    assert (standard_library_dataset(small, seq_len=16, vocab_size=300) / "manifest.json").exists()
    assert not [path for path in small.iterdir() if path.name.startswith(".")]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"corpus\.cache = .*/file/cache cannot be written \(Not a directory\)"):
        standard_library_dataset(tmp_path / "file" / "cache", seq_len=8, vocab_size=300)


def test_the_sources_are_sorted_modules_and_no_tests() -> None:
    files = standard_library_sources(ROOT)
    assert files == sorted(files)
    names = {str(file.relative_to(ROOT)) for file in files}
    assert {"ast.py", "json/decoder.py", "asyncio/base_events.py"} <= names
    assert not any(
        part in ("test", "tests", "site-packages", "idlelib", "encodings") for n in names for part in n.split("/")
    )


def test_sources_that_are_not_utf8_are_left_out_and_the_total_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    for name, content in (
        ("a.py", b"x = 1\n"),
        ("b.py", b"\xff"),
        ("c.py", b"y = 2\n"),
        ("test/d.py", b""),
        ("e.txt", b""),
    ):
        (tmp_path / name).write_bytes(content)
    assert [file.name for file in standard_library_sources(tmp_path)] == ["a.py", "c.py"]
    monkeypatch.setattr(corpus, "_MOST_BYTES", 7)
    assert [file.name for file in standard_library_sources(tmp_path)] == ["a.py"]
