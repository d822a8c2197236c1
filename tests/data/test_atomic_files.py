"""Atomic writes: complete or absent, whatever ends the block."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from femto_data.atomic import atomic_path, open_atomic, write_atomic


@pytest.mark.parametrize("content", ["schön\r\n", b"\x00\xff", memoryview(b"bytes")])
def test_a_file_is_written_whole_in_an_older_ones_place(tmp_path: Path, content: str | bytes | memoryview) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    write_atomic(file, content)
    assert file.read_bytes() == (content.encode() if isinstance(content, str) else bytes(content))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("older", [True, False])
def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path, error: type[BaseException], older: bool) -> None:
    file = tmp_path / "file"
    if older:
        file.write_text("old")

    def write_half() -> None:
        with open_atomic(file) as stream:
            stream.write(b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"] * older


def test_a_directory_may_be_made_and_the_partial_one_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".made.partial/deep").mkdir(parents=True)
    with atomic_path(tmp_path / "made") as partial:
        partial.mkdir()
        (partial / "inside").write_text("all")
        assert not (tmp_path / "made").exists()
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["made", "made/inside"]


def test_contents_are_on_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        seen.append("sync")
        fsync(descriptor)

    def logged_replace(old: Path, new: Path) -> None:
        seen.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    write_atomic(tmp_path / "file", "text")
    assert seen == ["sync", "name"]


def test_a_failing_rename_removes_the_partial_file(tmp_path: Path) -> None:
    (tmp_path / "taken/by").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_atomic(tmp_path / "taken", "text")
    assert os.listdir(tmp_path) == ["taken"]
