"""What processes say of themselves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rollmill.monitor import heartbeat
from rollmill.monitor.heartbeat import Heartbeat, beats


def test_a_process_says_what_it_does_and_how_it_ended(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, "explorer 0")
    beat.says("roll out", "4 groups", version=3)
    (said,) = beats(tmp_path)
    assert (said.name, said.pid, said.doing, said.waits_for, said.version) == (
        "explorer 0",
        os.getpid(),
        "roll out",
        "4 groups",
        3,
    )
    beat.says("roll out", "4 groups")
    assert beats(tmp_path)[0].since == said.since
    beat.close("done")
    beat.close("failed")
    (last,) = beats(tmp_path)
    assert (last.ended, last.waits_for, last.version) == ("done", "", 3)


def test_what_has_not_changed_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 60.0)
    beat, file = Heartbeat(tmp_path, "explorer 0"), tmp_path / "processes/explorer-0.json"
    beat.says("roll out", version=1)
    before = file.stat()
    for _ in range(3):
        beat.says("roll out", version=1)
    assert file.stat() == before
    beat.says("roll out", version=2)
    assert file.stat() != before
    beat.close("done")


def test_it_beats_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    beat = Heartbeat(tmp_path, "trainer")
    first = beats(tmp_path)[0].beat
    deadline = time.monotonic() + 10
    while beats(tmp_path)[0].beat == first:
        assert time.monotonic() < deadline, "no beat came"
        time.sleep(0.01)
    beat.close("done")


def test_what_is_no_beat_is_left_out(tmp_path: Path) -> None:
    Heartbeat(tmp_path, "trainer").close("done")
    (tmp_path / "processes" / "broken.json").write_text("{")
    (tmp_path / "processes" / "other.json").write_text('{"name": "x"}')
    assert [each.name for each in beats(tmp_path)] == ["trainer"]


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("a file in the way")
    beat = Heartbeat(tmp_path, "trainer")
    beat.says("train")
    beat.close("done")
    assert beats(tmp_path) == []
