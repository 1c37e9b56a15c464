"""The board: its own tasks, and a task from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import board
from bench.board import ROWS, practice_file
from bench.board_tasks import countdown, countdown_score, sorting
from bench.harness import BenchError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("expression", "problem", "score"),
    [
        ("3+4*2", "3 4 2=11", 1.0),
        ("4*2+3", "3 4 2=11", 1.0),  # in any order
        (" 9-4-5\n", "9 4 5=0", 1.0),
        ("3+4+2", "3 4 2=11", 0.0),  # another value
        ("3+8", "3 4 2=11", 0.0),  # another number
        ("3+4+4", "3 4 2=11", 0.0),
        ("11", "3 4 2=11", 0.0),
        ("22/2", "22 2=11", 0.0),  # no division
        ("2**3", "2 3=8", 0.0),
        ("-1+2", "1 2=1", 0.0),  # no sign
        ("True+1", "1 1=2", 0.0),
        ("1+", "1 1=2", 0.0),
        ("((((", "1 1=2", 0.0),
        ("1+1=2", "1 1=2", 0.0),
    ],
)
def test_countdown_takes_any_right_expression(expression: str, problem: str, score: float) -> None:
    assert countdown_score(expression, problem) == score


def test_teachers_are_wrong_as_often_as_they_should() -> None:
    for rows in (countdown(800, seed=1, mistakes=0.6), sorting(800, seed=1, mistakes=0.6)):
        found = list(rows)
        assert len({row["prompt"] for row in found}) == 800
        right = [
            row["response"] == row["answer"] or countdown_score(row["response"], row["answer"]) == 1.0 for row in found
        ]
        assert 0.35 < sum(right) / 800 < 0.45


def test_held_out_tasks_are_others() -> None:
    for task in (countdown, sorting):
        seen = {row["prompt"] for row in task(3000, seed=1)}
        assert not seen & {row["prompt"] for row in task(500, seed=2, held_out=True)}
        assert all(row["answer"] for row in task(20, seed=1))


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="size 50 is more than there are problems: 43 were found"):
        list(sorting(50, digits=2))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_task_of_the_board_against_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("ROLLMILL_BENCH_CACHE", str(tmp_path / "cache"))
    options = [
        "--rows",
        "sorting",
        "--seeds",
        "0",
        "--grid",
        "lr x2",
        "--target",
        "0.5",
        "--out",
        str(tmp_path / "board"),
    ]
    done = subprocess.run([sys.executable, "-m", "bench", "board", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["bench"], line["case"], line["peer_name"]) == ("board", "sorting: seconds", "TRL")
    found = json.loads((tmp_path / "board" / "sorting.json").read_text())
    assert [(run["side"], run["seed"], run["reached"]) for run in found["runs"]] == [
        ("ours", 0, True),
        ("trl", 0, True),
    ]
    assert set(found["tuned"]["trl"]["tried"]) == {"fp32 lr x2", "bf16 lr x2"}
    assert practice_file("sorting", ROWS["sorting"], 0).is_file()


def test_tuning_takes_the_setting_that_reaches_the_target_on_most_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "practice.yaml"
    stage.write_text("trainer: {lr: 1.0}")
    monkeypatch.setattr(board, "practice_file", lambda *_: stage)
    outcomes = {  # by type and optimizer steps per batch: of each seed, whether it is reached, and seconds
        ("fp32", 1): ((True, 1.0), (False, 9.0)),
        ("bf16", 1): ((True, 1.0), (False, 8.0)),
        ("bf16", 2): ((True, 20.0), (True, 20.0)),
    }

    def run(
        _name: str, _row: object, _side: str, options: list[str], seed: int, _limit: float | None
    ) -> dict[str, object]:
        text = " ".join(options)
        kind = "fp32" if "fp32" in text else "bf16", 2 if "updates_per_batch=2" in text else 1
        reached, seconds = outcomes[kind][board.TUNED_ON.index(seed)]
        return {"reached": reached, "seconds": seconds, "steps": 10}

    monkeypatch.setattr(board, "run", run)

    def best(*settings: str) -> str:
        return str(board.tune("sorting", ROWS["sorting"], "trl", settings)["best"])

    assert best("as given") == "bf16 as given"
    assert best("as given", "lr x2, 2 updates") == "bf16 lr x2, 2 updates"
    outcomes = dict.fromkeys(outcomes, ((False, 1.0), (False, 1.0)))
    with pytest.raises(BenchError, match=r"no setting of trl reached 0\.85"):
        best("as given")


def test_a_stopped_task_keeps_the_seeds_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "board" / "sorting.json"
    path.parent.mkdir()
    tuned = {"best": "fp32 as given", "options": [], "tried": {}}
    monkeypatch.setattr(board, "tune", lambda *_: tuned)

    def run(_name: str, _row: object, side: str, _options: list[str], seed: int) -> dict[str, object]:
        if (side, seed) == ("trl", 1):
            raise BenchError("stopped")
        return {"reached": True, "seconds": 1.0, "tokens": 10, "versions": {}}

    monkeypatch.setattr(board, "run", run)
    with pytest.raises(BenchError, match="stopped"):
        board.measure("sorting", ROWS["sorting"], (0, 1), ("as given",), path)
    assert [(one["side"], one["seed"]) for one in json.loads(path.read_text())["runs"]] == [("ours", 0), ("trl", 0)]
    board.report(path.parent, only_json=True)  # can be compared as it is
