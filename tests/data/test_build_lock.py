"""Directories that are built once: complete or absent, and only read when they exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from femto_core.errors import UserError
from femto_data import build_lock
from femto_data.build_lock import build_once


def write(folder: Path) -> None:
    (folder / "rows").write_text("all of them")


def test_a_directory_that_is_there_is_neither_locked_nor_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (build_once(tmp_path / "deep/cache/key", "data.cache", write) / "rows").read_text() == "all of them"
    monkeypatch.setattr(build_lock, "FileLock", None)
    assert build_once(tmp_path / "deep/cache/key", "data.cache", lambda _: 1 / 0) == tmp_path / "deep/cache/key"


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt, ValueError])
def test_one_that_fails_leaves_nothing_and_the_next_call_makes_it(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise error("no more")

    with pytest.raises(error, match="no more"):
        build_once(tmp_path / "key", "data.cache", fail)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    assert build_once(tmp_path / "key", "data.cache", write).is_dir()


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".key.partial").mkdir()
    (tmp_path / ".key.partial/half").write_text("")
    assert [file.name for file in build_once(tmp_path / "key", "data.cache", write).iterdir()] == ["rows"]
    assert not (tmp_path / ".key.partial").exists()


def test_where_nothing_can_be_written_the_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        build_once(tmp_path / "file/key", "some.cache", write)
    assert str(caught.value) == f"some.cache = {tmp_path}/file cannot be written (File exists); name another directory"
