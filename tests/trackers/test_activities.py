"""What each process did: the file that it writes, and the timeline that is made of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.ui_runs import activities, heartbeat

from rollmill.apps.studio.ui.run_details import process_timeline
from rollmill.trackers import activity_log
from rollmill.trackers.activity_log import Activity, ActivityLog, read_activities
from rollmill.trackers.heartbeat import HeartbeatWriter, activity_file


def test_a_process_writes_what_it_did(tmp_path: Path) -> None:
    beat = HeartbeatWriter(tmp_path, "explorer 0")
    for waits in ("4 groups", "3 groups", ""):
        beat.set_activity("roll out, step 1", waits, version=3)
    beat.close("done")
    HeartbeatWriter(tmp_path, "explorer 0").close("failed")
    found = read_activities(activity_file(tmp_path, "explorer 0"))
    assert [(each.kind, each.waits_for, each.version) for each in found] == [
        ("start", "", -1),
        ("roll out", "4 groups", 3),
        ("roll out", "", 3),
        ("", "", -1),
        ("start", "", -1),
        ("", "", -1),
    ]
    assert [each.time for each in found] == sorted(each.time for each in found)


def test_a_large_file_loses_its_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_log, "MOST_BYTES", 2000)
    log = ActivityLog(tmp_path / "trainer.jsonl")
    for number in range(500):
        log.add(Activity(float(number), f"train, step {number}"))
    found = read_activities(tmp_path / "trainer.jsonl")
    assert (tmp_path / "trainer.jsonl").stat().st_size <= 2000
    assert [each.time for each in found] == list(range(500 - len(found), 500))
    assert len(found) > 20


def test_damaged_lines_and_folders_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    path.write_bytes(b'{}\n[1, "a", "", 2]\n[1, 2, 3, 4]\n[1, "a"]\nnull\n\xff\n[2, "b", "", 0]\n[3, "c"')
    assert [each.doing for each in read_activities(path)] == ["a", "b"]
    ActivityLog(tmp_path / "away" / "trainer.jsonl").add(Activity(0.0, "train"))
    assert read_activities(tmp_path / "away" / "trainer.jsonl") == []


def test_the_timeline_of_several_processes(tmp_path: Path) -> None:
    activities(tmp_path, 20)
    whole = process_timeline(tmp_path, None)
    assert whole["end"] - whole["begin"] >= 99  # until now
    spans = {each["name"]: each["spans"] for each in whole["processes"]}
    assert [span[2] for span in spans["trainer"][:5]] == ["roll out", "reward", "inference", "train", "roll out"]
    assert spans["trainer"][0][:2] == (0.0, 2.0)
    assert [span[4] for span in spans["explorer 0"]] == list(range(20))
    assert spans["explorer 1"][0][0] == pytest.approx(50, abs=0.01)
    last = process_timeline(tmp_path, 10)
    assert last["end"] - last["begin"] == pytest.approx(10)
    assert all(0 <= span[0] <= span[1] <= 10.001 for each in last["processes"] for span in each["spans"])


def test_a_long_timeline_is_thinned_out(tmp_path: Path) -> None:
    heartbeat(tmp_path, os.getpid(), name="trainer")
    log, begin = ActivityLog(activity_file(tmp_path, "trainer")), time.time() - 5000
    for step in range(5000):
        log.add(Activity(begin + step, f"train, step {step}"))
        log.add(Activity(begin + step + 0.7, f"inference, step {step}"))
    [trainer] = process_timeline(tmp_path, None)["processes"]
    start, end, kind, *_ = trainer["spans"][0]  # neighbours that are alike
    assert (start, kind) == (0.0, "train")
    assert end > 4900
    [trainer] = process_timeline(tmp_path, 100)["processes"]
    assert {span[2] for span in trainer["spans"]} == {"train", "inference"}
    for before, after in zip(trainer["spans"], trainer["spans"][1:], strict=False):
        assert before[1] <= after[0] + 1e-3
