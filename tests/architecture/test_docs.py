"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from femto_core.plugins import hook_names
from femto_tools.hookdoc import render

ROOT = Path(__file__).parents[2]


def test_the_hook_reference_is_what_femto_hooks_prints() -> None:
    assert (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8") == render(), "run: femto hooks > docs/hooks.md"


@pytest.mark.parametrize("name", hook_names())
def test_the_hook_reference_has_each_hook_with_its_arguments_and_its_moment(name: str) -> None:
    part = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", render(), re.MULTILINE | re.DOTALL)
    assert part, f"no section for {name}"
    assert re.search(rf"^{name}\(.*\) -> ", part[1], re.MULTILINE)
    assert "When: " in part[1]


@pytest.mark.parametrize("name", hook_names())
def test_each_hook_is_answered_by_the_defaults_or_named_in_a_test(name: str) -> None:
    files = [ROOT / "femto_core" / "defaults.py", *(ROOT / "tests").rglob("test_*.py")]
    assert any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in files)


@pytest.mark.parametrize("document", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_links_lead_to_files_that_define_what_they_name(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)#]+)[^)]*\)", text):
        if "://" in target:
            continue
        file = document.parent / target
        assert file.exists(), f"{document.name} links {target}"
        symbol = re.fullmatch(r"`(\w+)\.(\w+)`", label)
        if symbol:
            assert file.stem == symbol[1], f"{label} is said to be in {target}"
            defined = rf"^(?:def|class) {symbol[2]}\b|^{symbol[2]}\b.* = "
            assert re.search(defined, file.read_text(encoding="utf-8"), re.MULTILINE), f"{target} has no {symbol[2]}"


def test_the_tour_links_every_stop() -> None:
    stops = re.findall(r"^\d+\. .*?(?=^\d+\. |^Other|\Z)", (ROOT / "docs" / "tour.md").read_text(), re.M | re.S)
    assert len(stops) == 11
    assert all("](../" in stop for stop in stops)
