from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.errors import RollmillError
from rollmill.trackers import MetricsLog, read_metrics, wilson_interval


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"bare {name}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_is_readable_before_the_log_is_closed(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"step": 1, "stage": "rl", "loss": 0.5})
    assert read_metrics(path.parent) == [{"step": 1, "stage": "rl", "loss": 0.5}]


def test_numbers_that_json_lacks_become_null_and_numpy_becomes_plain(path: Path) -> None:
    MetricsLog(path).append(
        {"step": 1, "a": float("nan"), "b": -math.inf, "c": float(np.float32(0.5)), "d": np.float64("nan")}
    )
    assert lines(path) == [{"step": 1, "a": None, "b": None, "c": 0.5, "d": None}]


def test_evaluation_and_step_share_one_line_in_either_order(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"step": 0, "eval/greedy": 0.1})
    log.append({"step": 1, "loss": 1.0})
    log.append({"step": 1, "eval/greedy": 0.2})
    log.append({"step": 2, "eval/greedy": 0.3})
    log.append({"step": 2, "loss": 2.0})
    log.append({"step": 3, "loss": 3.0})
    assert lines(path) == [
        {"step": 0, "eval/greedy": 0.1},
        {"step": 1, "loss": 1.0, "eval/greedy": 0.2},
        {"step": 2, "eval/greedy": 0.3, "loss": 2.0},
        {"step": 3, "loss": 3.0},
    ]


def test_truncation_drops_later_steps_and_the_log_goes_on(path: Path) -> None:
    log = MetricsLog(path)
    for step in range(1, 6):
        log.append({"step": step})
    log.truncate_after(3)
    log.append({"step": 4, "again": 1})
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": 1}]
    assert [one.name for one in path.parent.iterdir()] == ["metrics.jsonl"]


@given(st.integers(0, 200))
def test_a_log_cut_anywhere_keeps_its_whole_lines_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 9):
        log.append({"step": step, "stage": "rl"})
    log.close()
    whole = path.read_bytes()
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut])
    kept = len(whole[: cut + 1].splitlines()) - (not whole[: cut + 1].endswith(b"\n"))  # a whole line lacks at most \n
    assert [row["step"] for row in read_metrics(path.parent)] == list(range(1, kept + 1))
    log = MetricsLog(path)
    log.append({"step": 99})
    assert [row["step"] for row in lines(path)] == [*range(1, kept + 1), 99]


def test_a_damaged_line_is_named(path: Path) -> None:
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RollmillError, match=r"metrics\.jsonl:2 is not JSON"):
        read_metrics(path.parent)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RollmillError, match=r"cannot write .*file/metrics\.jsonl.*--out"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")


def test_a_full_disk_is_an_error_that_says_so() -> None:
    from rollmill.files import explain_write_errors

    with (
        pytest.raises(RollmillError, match=r"cannot write /dev/full: No space left on device\. Free some space"),
        explain_write_errors(Path("/dev/full")),
    ):
        Path("/dev/full").write_bytes(b"x")


def test_wilson_interval_agrees_with_published_values() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score without continuity correction)
    for (successes, n), expected in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson_interval(successes, n, 1.959964) == pytest.approx(expected, abs=5e-5)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_rate_within_zero_and_one(case: tuple[int, int]) -> None:
    successes, n = case
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n + 1e-12
    assert successes / n - 1e-12 <= high <= 1
    other_low, other_high = wilson_interval(n - successes, n)
    assert (1 - other_high, 1 - other_low) == pytest.approx((low, high), abs=1e-9)


def test_wilson_interval_of_nothing_is_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
