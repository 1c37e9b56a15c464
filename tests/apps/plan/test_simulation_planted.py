"""Bugs planted in the orchestrator's code: their texts are there, and the committed table says which are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import BenchError
from bench.simulation import main
from bench.simulation.invariants import INVARIANTS
from bench.simulation.planted import BUGS, FOUND, TABLE, planted, replay_bug

ROWS: list[dict[str, Any]] = json.loads(TABLE.read_text())["bugs"]
SEEN = [row for row in ROWS if row["seed"] is not None]


@pytest.mark.parametrize("name", [bug.name for bug in BUGS])
def test_a_bug_can_be_planted_in_the_code_as_it_is(name: str) -> None:
    with planted(name):
        pass


def test_the_table_has_all_bugs_and_enough_of_them_are_found() -> None:
    assert [row["bug"] for row in ROWS] == [bug.name for bug in BUGS]
    assert len(ROWS) >= 20
    assert len(SEEN) >= max(19, FOUND * len(ROWS))
    assert {row["invariant"] for row in SEEN} <= set(INVARIANTS)


@pytest.mark.parametrize("row", SEEN[:3], ids=lambda row: row["bug"])
def test_a_seed_finds_its_bug(row: dict[str, Any]) -> None:
    violation = replay_bug(row["bug"], row["seed"]).violation
    assert violation is not None
    assert violation.invariant == row["invariant"]


@pytest.mark.slow
@pytest.mark.parametrize("row", SEEN[3:], ids=lambda row: row["bug"])
def test_every_seed_of_the_table_finds_its_bug(row: dict[str, Any]) -> None:
    test_a_seed_finds_its_bug(row)


def test_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.simulation.planted.TABLE", tmp_path / "simulation.json")
    assert main(["--bugs", "--seeds", "2", "--bug", BUGS[0].name], only_json=True) == 0
    [row] = json.loads((tmp_path / "simulation.json").read_text())["bugs"]
    assert (row["bug"], row["invariant"], row["seed"]) == (BUGS[0].name, "pacing", 0)


def test_unknown_bugs_are_refused() -> None:
    with pytest.raises(BenchError, match="no bug is called 'none'"), planted("none"):
        pass
