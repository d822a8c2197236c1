"""The cache: rows are built once, by one process, complete or not at all, and found by a digest."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest

from femto_core.config import config_class, make_config
from femto_core.errors import UserError
from femto_sft.cache import make_rows, packed_rows, report
from femto_sft.plugin import SupervisedFineTuning
from femto_sft.rows import ConversationRows
from femto_sft.section import SFTSection
from femto_sft.sources import ConversationSource, find_sources
from femto_tools.testing import WorkerPool
from tests.sft import making
from tests.sft.making import packed, refusal, rows_of, section, talk, write_lines


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def test_equal_inputs_give_equal_bytes_wherever_they_lie(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        file = write_lines(tmp_path / f"{name}.jsonl", *(talk(i, i % 7 + 1) for i in range(50)))
        rows = rows_of(tmp_path / name, file, held_out=0.1)
        found.append((rows.fingerprint, contents(rows.directory)))
    (first, files), (second, others) = found
    assert first == second
    assert files == others


def test_a_second_run_makes_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1))
    first = rows_of(tmp_path, file)
    monkeypatch.setattr("femto_sft.cache.make_rows", None)
    assert rows_of(tmp_path, file).directory == first.directory


@pytest.mark.parametrize(
    "change",
    [
        {"packing": "bfd"},
        {"overlong": "split"},
        {"train_on": "all"},
        {"held_out": 0.1},
        {"template": making.MARKED},
        {"seq_len": 65},
        {"malformed": "skip"},
    ],
    ids=str,
)
def test_what_decides_the_rows_decides_the_fingerprint(tmp_path: Path, change: dict[str, Any]) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1), talk(2))
    assert rows_of(tmp_path, file).fingerprint != rows_of(tmp_path, file, **change).fingerprint


def test_other_contents_of_the_same_file_are_seen(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1))
    before = rows_of(tmp_path, file).fingerprint
    assert rows_of(tmp_path, write_lines(file, talk(2))).fingerprint != before


@pytest.mark.parametrize("library", ["transformers", "tokenizers"])
def test_another_version_of_what_tokenises_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1))
    before = rows_of(tmp_path, file).fingerprint
    monkeypatch.setattr(f"femto_sft.cache.{library}.__version__", "0.0.1")
    assert rows_of(tmp_path, file).fingerprint != before


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1))

    def changing(*arguments: Any, **options: Any) -> None:
        with file.open("a") as stream:
            stream.write(json.dumps(talk(2)))
        make_rows(*arguments, **options)

    monkeypatch.setattr("femto_sft.cache.make_rows", changing)
    assert refusal(tmp_path, file).startswith(f"{file} was changed while it was read; run the command again when")


def test_a_cache_that_is_complete_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1))
    first = rows_of(tmp_path, file)
    monkeypatch.setattr("femto_data.build_lock.FileLock", None)
    assert rows_of(tmp_path, file).directory == first.directory


def test_the_log_names_the_files_that_were_given_not_those_that_filled_the_cache(tmp_path: Path) -> None:
    lines = (talk(1), "{", talk(2))
    for name in ("old", "new"):
        files = [write_lines(tmp_path / f"{name}{i}.jsonl", *lines[i:]) for i in range(2)]
        found = packed(tmp_path, *files, malformed="skip")
        log = "\n".join(report(found))
        assert f"of {files[0]} (format messages, recognised by its keys), {files[1]} (format messages" in log
        assert f"2 malformed rows skipped, the first of them {files[0]}, line 2: not valid JSON" in log
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1


def test_a_run_reads_its_files_once_for_both_splits_and_the_next_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(paths: tuple[str, ...], split: str) -> list[ConversationSource]:
        asked.append(paths)
        return find_sources(paths, split)

    monkeypatch.setattr("femto_sft.cache.find_sources", counted)
    settings = attrs.asdict(section(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1))))
    config = make_config(config_class({"sft": SFTSection}), {"sft": settings, "data": {"seq_len": 64}}, {})
    plugin = SupervisedFineTuning()
    for runs in (1, 2):
        assert [len(plugin.femto_dataset(config, split)) for split in ("train", "held_out")] == [1, 0]
        assert len(asked) == runs


def test_processes_that_come_at_once_share_one_set_of_rows(tmp_path: Path, pool: WorkerPool) -> None:
    file = write_lines(tmp_path / "a.jsonl", *(talk(i) for i in range(500)))
    settings = section(tmp_path, file)
    assert len(set(pool.run(4, make, settings))) == 1
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1


def make(settings: SFTSection) -> str:
    return str(packed_rows(settings, seq_len=64, model="").directory)


def test_what_a_killed_run_left_is_swept(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", talk(1))
    rows = rows_of(tmp_path, file)
    whole = contents(rows.directory)
    rows.directory.rename(rows.directory.with_name(f".{rows.directory.name}.partial"))
    (rows.directory.with_name(f".{rows.directory.name}.partial") / "tokens").write_bytes(b"half")
    assert contents(rows_of(tmp_path, file).directory) == whole


@pytest.mark.parametrize("name", ["tokens", "starts", "train.rows", "manifest.json"])
@pytest.mark.parametrize("how", ["shortened", "removed"])
def test_damaged_rows_are_refused_by_name(tmp_path: Path, name: str, how: str) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1)))
    file = rows.directory / name
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
        if name == "manifest.json":
            file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=name):
        ConversationRows(rows.directory, "train")


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", talk(1)), cache=str(tmp_path / "file" / "cache"))


@pytest.mark.parametrize("size", [100, 2000, 6000])
def test_a_full_disk_is_said_and_nothing_is_kept(tmp_path: Path, size: int) -> None:
    source = write_lines(tmp_path / "a.jsonl", *[talk(i) for i in range(40)])
    settings = section(tmp_path, source)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(UserError, match=r"^sft.cache = .* cannot be completed \(.*File too large") as caught:
            packed_rows(settings, seq_len=64, model="")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "\n" not in str(caught.value)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]
    assert packed_rows(settings, seq_len=64, model="").directory.is_dir()
