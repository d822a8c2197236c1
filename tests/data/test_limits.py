"""Limits of time and memory for the code that a tokenizer's files bring along."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest

from femto_core.errors import UserError
from femto_data.limits import bounded_memory, each_within_limits, within_limits


def test_items_come_in_order_and_errors_as_they_are() -> None:
    assert each_within_limits(range(3), "counting") == [0, 1, 2]
    assert within_limits(lambda: "made", "making") == "made"
    with pytest.raises(ZeroDivisionError):
        within_limits(lambda: 1 // 0, "dividing")


def test_an_item_that_takes_too_long_is_refused_and_many_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("femto_data.limits.SECONDS", 0.2)
    stop: list[bool] = []

    def busy(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end and not stop:
            pass

    def short() -> Iterator[None]:
        for _ in range(6):
            busy(0.1)
            yield

    assert len(each_within_limits(short(), "short items")) == 6
    with pytest.raises(UserError, match=r"^a long item takes more than 0 s of processor time, as if it never ended$"):
        within_limits(lambda: busy(60), "a long item")
    stop.append(True)


def test_memory_is_bounded_in_the_block_only() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with bounded_memory(), pytest.raises(MemoryError):
        bytearray(2**33)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
