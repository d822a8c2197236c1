"""What the environment says of a world is checked, variable by variable; names of folders too."""

from __future__ import annotations

import pytest

from femto_ops.differences import first_difference
from femto_ops.meeting import MeetingPlace, read_place
from femto_ops.paths import is_folder_name

WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


def test_without_ranks_there_is_no_meeting_place() -> None:
    assert read_place({}) is None
    assert read_place({"MASTER_ADDR": "here", "LOCAL_RANK": "0"}) is None


def test_a_meeting_place_is_what_torchrun_describes() -> None:
    place = MeetingPlace(host="here", port=29500, rank=1, world_size=2, launcher_hosts=False, attempt="restart-0")
    assert read_place(WORLD) == place
    restarted = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    again = read_place({**WORLD, "LOCAL_WORLD_SIZE": "2", **restarted})
    assert again is not None
    assert (again.attempt, again.launcher_hosts) == ("restart-3", True)
    several_machines = read_place({**WORLD, "LOCAL_WORLD_SIZE": "1", **restarted})
    assert several_machines is not None
    assert several_machines.attempt == "restart-0"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "x", "RANK = 'x' (in the environment): must be a whole number from 0 to 1"),
        ("RANK", "2", "RANK = '2' (in the environment): must be a whole number from 0 to 1"),
        ("RANK", "-1", "RANK = '-1' (in the environment): must be a whole number from 0 to 1"),
        ("RANK", "9" * 5000, "must be a whole number from 0 to 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE = '0' (in the environment): must be a whole number from 1"),
        ("WORLD_SIZE", "1.5", "WORLD_SIZE = '1.5' (in the environment): must be a whole number from 1"),
        ("MASTER_PORT", "70000", "MASTER_PORT = '70000' (in the environment): must be a whole number from 1 to 65535"),
        *(
            (name, "", f"{name} is not set in the environment; whoever starts ranks sets RANK, WORLD_SIZE, MASTER_ADDR")
            for name in WORLD
        ),
    ],
)
def test_a_variable_that_is_wrong_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match="environment") as refused:
        read_place({**WORLD, name: value})
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["", "r", "a/b", "a/b/", "20261207-110000", "ünïcode", "x" * 200, "..x", "a..b"])
def test_a_name_within_the_folder_may_stay(name: str) -> None:
    assert is_folder_name(name)


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", ".", "..", "a/../..", "./", "a/..", "x" * 201, "é" * 101, "a\0b", "a\nb", "C:\\x", "\\x", "\ud800"],
)
def test_a_name_that_leads_elsewhere_is_none(name: str) -> None:
    assert not is_folder_name(name)


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": 1}, {"a": 2}, ("a", 1, 2)),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ("a.c", 2, 3)),
        ({"a": {"b": 1}}, {"a": {}}, ("a.b", 1, None)),
        ({"a": {"b": 1}}, {}, ("a", {"b": 1}, None)),
    ],
)
def test_the_first_difference_is_one_key_with_both_values(one: dict, other: dict, found: tuple) -> None:  # type: ignore[type-arg]
    assert first_difference(one, other) == found
