"""What processes say of themselves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rollmill.trackers import heartbeat
from rollmill.trackers.heartbeat import HeartbeatWriter, read_heartbeats


def test_a_process_says_what_it_does_and_how_it_ended(tmp_path: Path) -> None:
    beat = HeartbeatWriter(tmp_path, "explorer 0")
    beat.set_activity("roll out", "4 groups", version=3)
    (said,) = read_heartbeats(tmp_path)
    assert (said.name, said.pid, said.doing, said.waits_for, said.version) == (
        "explorer 0",
        os.getpid(),
        "roll out",
        "4 groups",
        3,
    )
    beat.set_activity("roll out", "4 groups")
    assert read_heartbeats(tmp_path)[0].since == said.since
    beat.close("done")
    beat.close("failed")
    (last,) = read_heartbeats(tmp_path)
    assert (last.ended, last.waits_for, last.version) == ("done", "", 3)


def test_what_has_not_changed_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_INTERVAL_S", 60.0)
    beat, file = HeartbeatWriter(tmp_path, "explorer 0"), tmp_path / "processes/explorer-0.json"
    beat.set_activity("roll out", version=1)
    before = file.stat()
    for _ in range(3):
        beat.set_activity("roll out", version=1)
    assert file.stat() == before
    beat.set_activity("roll out", version=2)
    assert file.stat() != before
    beat.close("done")


def test_it_beats_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_INTERVAL_S", 0.01)
    beat = HeartbeatWriter(tmp_path, "trainer")
    first = read_heartbeats(tmp_path)[0].beat
    deadline = time.monotonic() + 10
    while read_heartbeats(tmp_path)[0].beat == first:
        assert time.monotonic() < deadline, "no beat came"
        time.sleep(0.01)
    beat.close("done")


def test_what_is_no_beat_is_left_out(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path, "trainer").close("done")
    (tmp_path / "processes" / "broken.json").write_text("{")
    (tmp_path / "processes" / "other.json").write_text('{"name": "x"}')
    assert [each.name for each in read_heartbeats(tmp_path)] == ["trainer"]


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("a file in the way")
    beat = HeartbeatWriter(tmp_path, "trainer")
    beat.set_activity("train")
    beat.close("done")
    assert read_heartbeats(tmp_path) == []
