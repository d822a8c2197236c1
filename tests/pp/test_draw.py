"""`femto pp-draw`: a readable timeline, a valid PNG, and a sentence for arguments that are impossible."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from femto_core.cli import run_command
from femto_core.errors import UserError
from femto_pp.draw import as_text
from femto_pp.placement import round_robin
from femto_pp.simulate import play
from tests.pp.tasks import NAMES


def draw(words: list[str]) -> int:
    return run_command(["pp-draw", "--plugins", "pp", *words])


def test_the_text_is_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(["--schedule", "1f1b", "--size", "2", "--micro-batches", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["rank", "0", "F0", "F1", "B0", "..", "F2", "B1", "..", "B2", ".."]
    assert said[1].split() == ["rank", "1", "F0", "B0", "..", "F1", "B1", "..", "F2", "B2", ".."]
    column = {label: said[1].index(label) for label in ("F0", "B0", "F1")}
    assert column["F0"] == said[0].index("F1"), "computations of one time are in one column"
    assert said[-1] == "1f1b: bubble 25.0%, forwards in flight 2, 1"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "m"), [(1, 1), (3, 12), (4, 7)])
def test_every_action_is_in_the_text_once_in_its_rank_s_line(name: str, size: int, m: int) -> None:
    played = play(name, m, round_robin(size, 2 if name == "interleaved" else 1))
    lines = as_text(played).splitlines()
    assert len(lines) == size
    for rank, line in enumerate(lines):
        wanted = [str(p.compute) for p in played.timeline if p.rank == rank]
        assert re.findall(r"[FBW]\d+(?:\.\d+)?", line) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = tmp_path / "drawn.png"
    assert draw(["--schedule", name, "--output", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 600
    assert height > 200
    assert len(data) > 5000
    assert data[-8:-4] == b"IEND"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "zerobubble"], "pp.schedule = 'zerobubble' is no schedule"),
        (["--schedule", "1f1b", "--chunks", "2"], "pp.chunks = 2: schedule 1f1b takes 1"),
        (["--size", "0"], "--size = '0' (on the command line): must be greater than 0"),
        (["--micro-batches", "0"], "--micro-batches = '0' (on the command line): must be greater than 0"),
        (["--chunks", "-1"], "--chunks = '-1' (on the command line): must not be negative"),
        (["--output", "/nowhere/at/all.png"], "/nowhere/at/all.png"),
        (["--output", "drawn.xyz"], "drawn.xyz"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        draw(words)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--micro-batches", "100000"], ["--size", "100000"], ["--chunks", "100000"]])
def test_a_timeline_too_large_to_draw_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="at most 10,000 are drawn"):
        draw(words)
