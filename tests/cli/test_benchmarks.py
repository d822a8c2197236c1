"""`make bench`: what it decides before it measures."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import PAIRS, Entry, line, pairs_of


def result(tokens_per_s: float, processor_ms: float) -> dict[str, float]:
    return {
        "tokens_per_s": tokens_per_s,
        "processor_ms": processor_ms,
        "peak_mib": 100.0,
        "first_loss": 9.0,
        "last_loss": 8.0,
    }


def test_where_bf16_is_slow_no_pair_is_measured_twice() -> None:
    wide = [pair for name in PAIRS for pair in pairs_of(name, "float32")]
    assert not [ours for ours, _ in wide if "accumulate_dtype" in ours.contender]
    assert len(wide) + 1 == len([pair for name in PAIRS for pair in pairs_of(name, "bfloat16")])


def test_a_line_has_the_ratio_of_each_round_in_wall_time_and_the_median_in_processor_time() -> None:
    ours, theirs = Entry("femto"), Entry("ddp")
    results = {ours: [result(100, 50), result(110, 60), result(90, 40)], theirs: [result(100, 100)] * 3}
    cells = [cell.strip() for cell in line(ours, theirs, results, 1).strip("|").split("|")]
    assert cells == [
        *("femto on 2", "100", "ddp on 2", "100", "1.000 x (1.000, 1.100, 0.900)", "0.500 x", "100 : 100", "1.00 x")
    ]


def test_contenders_that_did_other_work_stop_the_run() -> None:
    ours, theirs = Entry("femto"), Entry("ddp")
    results = {ours: [result(100, 50)], theirs: [{**result(100, 50), "last_loss": 5.0}]}
    with pytest.raises(SystemExit, match=r"femto on 2 and ddp on 2 differ in last_loss: 8.0 and 5.0"):
        line(ours, theirs, results, 1)
