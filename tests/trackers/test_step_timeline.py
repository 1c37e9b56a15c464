"""Spans of a step: collected, written, read again and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.apps.studio.report.timelines import LEFT, RIGHT, draw_step_timeline
from rollmill.errors import RollmillError
from rollmill.trackers.step_timeline import TIMELINE_FILE, drop_steps_after, read_step_timelines, write_step_timeline
from rollmill.trackers.trace import Span, Trace, max_queue_depth

PHASES = ("rollout", "reward", "train")
METRICS = {"step": 3, "stage": "rl", "seconds/total": 4.0}
SPANS = [
    Span("rollout", 10.0, 10.0, 12.0),
    Span("generate", 10.0, 10.5, 11.0),
    Span("generate", 10.0, 10.0, 12.0),
    Span("reward/math", 11.0, 11.0, 11.5),
    Span("reward/math", 9.0, 12.0, 13.0),
    Span("train", 13.0, 13.0, 14.0),
]


def test_components_on_the_device_have_a_lane_each_and_their_size(tmp_path: Path) -> None:
    on_device = [
        Span("device/rollout/policy", 10.0, 10.0, 12.0, 400_000_000),
        Span("device/train/policy", 13.0, 13.0, 14.0, 400_000_000),
        Span("device/train/critic_optimizer", 13.0, 13.0, 14.0, 2_500_000),
        Span("device/train/critic_optimizer", 12.5, 12.5, 13.0, 1_000_000),
    ]
    write_step_timeline(tmp_path, METRICS, 10.0, SPANS + on_device)
    row = read_step_timelines(tmp_path)[3]
    assert row["bytes"]["device/train/critic_optimizer"] == 2_500_000
    drawn = draw_step_timeline(row, PHASES)
    lanes = {lane.name: lane for lane in drawn.lanes}
    assert [lane.name for lane in drawn.lanes] == ["step", "critic optimizer", "policy", "generate", "math"]
    assert lanes["policy"].note == "on the device, 0.4 GB"
    assert lanes["critic optimizer"].note == "on the device, 2.5 MB"
    assert [bar.kind for bar in lanes["policy"].bars] == ["rollout", "train"]
    assert {bar.y for bar in lanes["policy"].bars} == {lanes["policy"].y}
    phases = {bar.kind: (bar.middle, bar.end) for bar in lanes["step"].bars}
    assert {bar.kind: (bar.middle, bar.end) for bar in lanes["policy"].bars} == phases


def test_spans_are_taken_once() -> None:
    trace = Trace()
    with trace.enter_phase("train"):
        trace.add("generate", 1.0, 2.0, 3.0)
    generated, trained = trace.take()
    assert generated == Span("generate", 1.0, 2.0, 3.0)
    assert (trained.kind, trained.requested) == ("train", trained.started)
    assert trained.ended >= trained.started
    assert trace.take() == []


def test_what_fails_is_noted_too() -> None:
    trace = Trace()
    with pytest.raises(ZeroDivisionError), trace.enter_phase("train"):
        _ = 1 / 0
    assert [span.kind for span in trace.take()] == ["train"]


def test_most_waiting() -> None:
    assert max_queue_depth([]) == 0
    assert max_queue_depth([Span("a", 0, 0, 5), Span("a", 1, 1, 2)]) == 0
    assert max_queue_depth([Span("a", 0, 2, 3), Span("a", 1, 3, 4), Span("a", 2, 4, 5)]) == 2


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_most_waiting_is_the_deepest_queue(times: list[tuple[int, int]]) -> None:
    spans = [Span("a", asked, asked + waited, 99) for asked, waited in times]
    depths = [sum(span.requested <= at < span.started for span in spans) for at in range(41)]
    assert max_queue_depth(spans) == max(depths)


def test_a_step_is_written_relative_to_its_beginning_and_the_last_line_counts(tmp_path: Path) -> None:
    assert read_step_timelines(tmp_path) == {}
    write_step_timeline(tmp_path, METRICS | {"step": 2}, 10.0, SPANS[:1])
    write_step_timeline(tmp_path, METRICS, 10.0, SPANS[:1])
    write_step_timeline(tmp_path, METRICS, 10.0, SPANS)
    steps = read_step_timelines(tmp_path)
    assert sorted(steps) == [2, 3]
    assert steps[3]["seconds"] == 4.0
    assert steps[3]["spans"]["generate"] == [[0.0, 0.5, 1.0], [0.0, 0.0, 2.0]]
    assert steps[3]["spans"]["reward/math"] == [[1.0, 1.0, 1.5], [-1.0, 2.0, 3.0]]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write_step_timeline(tmp_path, METRICS, 10.0, SPANS)
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write('{"step": \n')
    with pytest.raises(RollmillError, match=r"timeline\.jsonl:2 is not JSON"):
        read_step_timelines(tmp_path)


def test_the_picture_has_a_lane_for_each_kind_in_one_scale(tmp_path: Path) -> None:
    write_step_timeline(tmp_path, METRICS, 10.0, SPANS)
    chart = draw_step_timeline(read_step_timelines(tmp_path)[3], PHASES)
    assert [lane.name for lane in chart.lanes] == ["step", "generate", "math"]
    assert [bar.kind for bar in chart.lanes[0].bars] == ["rollout", "train"]
    assert chart.lanes[2].note == "2, mean 0.75 s"
    scale = (RIGHT - LEFT) / 5  # from -1 s to 4 s
    early, late = chart.lanes[2].bars
    assert (early.x, early.middle, early.end) == pytest.approx((LEFT, LEFT + 3 * scale, LEFT + 4 * scale), abs=0.02)
    assert (late.x, late.middle, late.end) == pytest.approx((LEFT + 2 * scale,) * 2 + (LEFT + 2.5 * scale,), abs=0.02)
    assert early.y + early.height <= late.y
    assert {label for _, label in chart.ticks} >= {"0 s", "2 s", "4 s"}
    bottoms = [bar.y + bar.height for lane in chart.lanes for bar in lane.bars]
    assert max(bottoms) < chart.height


def test_of_many_completions_some_are_drawn(tmp_path: Path) -> None:
    write_step_timeline(tmp_path, METRICS, 10.0, [Span("generate", 10.0, 10.0, 11.0 + i / 1000) for i in range(1000)])
    chart = draw_step_timeline(read_step_timelines(tmp_path)[3], PHASES)
    [_, lane] = chart.lanes
    assert 28 <= len(lane.bars) <= 56
    assert lane.note == "1000, mean 1.5 s"
    assert chart.height < 200


def test_a_resumed_run_drops_later_steps_and_a_line_that_a_killed_run_left_unfinished(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step_timeline(tmp_path, METRICS | {"step": step}, 10.0, SPANS)
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write('{"step": 4, "sta')
    assert sorted(read_step_timelines(tmp_path)) == [1, 2, 3]
    drop_steps_after(tmp_path, 2)
    write_step_timeline(tmp_path, METRICS | {"step": 5}, 10.0, SPANS)
    assert sorted(read_step_timelines(tmp_path)) == [1, 2, 5]
    drop_steps_after(tmp_path / "none", 2)
