"""`rollmill testcases`: problems in, problems with sound tests out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.cli import main

GENERATOR = "n = int(input())\nprint(n, 7)"
RIGHT = "print(sum(map(int, input().split())))"
WRONG = "print(8)"
FEW = ["--cases", "3", "--submissions", "3", "--agree", "2", "--solve", "2", "--jobs", "1"]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sound_problems_are_kept_with_their_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = write(
        tmp_path / "problems.jsonl",
        {"id": "sum", "prompt": "Add.", "generator": GENERATOR, "submissions": [RIGHT, RIGHT, WRONG]},
        {"id": "odd", "prompt": "Odd.", "generator": GENERATOR, "submissions": [RIGHT, WRONG]},
    )
    out = tmp_path / "tasks.jsonl"
    assert main(["testcases", "--input", str(problems), "--output", str(out), *FEW]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 problems kept" in printed
    assert "2 submissions of 3" in printed
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row.keys() == {"id", "prompt", "tests"}
    assert row["tests"][0] == {"stdin": "1 7\n", "stdout": "8\n", "kind": "generated"}
    assert main(["testcases", "--input", str(problems), "--output", str(out), *FEW, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"problem": "sum", "kept": True, "cases": 3, "valid": 3, "solved": 2, "reason": None}
    answers = write(tmp_path / "answers.jsonl", row | {"response": RIGHT}, row | {"response": WRONG})
    assert main(["grade", "--reward", "code", "--input", str(answers)]) == 0
    graded = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["reward"], each["outcomes"]) for each in graded] == [
        (1.0, {"code": "ok"}),
        (0.0, {"code": "wrong_answer"}),
    ]
    assert graded[0]["details"] == {"code/generated": 1.0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"submissions": []}, "problems.jsonl:1: `generator` has to be the text of a program, found None"),
        ({"generator": "x"}, "problems.jsonl:1: `submissions` has to be a list of programs, found None"),
        ({"generator": "x", "submissions": [1]}, r"`submissions` has to be a list of programs, found [1]"),
        ({"generator": "x", "submissions": [], "entry_point": 1}, "`entry_point` has to be the name of a function"),
        ([1], "problems.jsonl:1: expected an object, found list"),
    ],
)
def test_wrong_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, message: str) -> None:
    problems = write(tmp_path / "problems.jsonl", row)
    assert main(["testcases", "--input", str(problems), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agree", "11"], "agree is 11; it has to be from 1 to submissions (10)"),
        (["--time-limit-s", "0"], "--time-limit-s 0: it has to be above 0"),
        (["--input", "missing.jsonl"], "missing.jsonl: no such file"),
    ],
)
def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    problems = write(tmp_path / "problems.jsonl", {"generator": GENERATOR, "submissions": []})
    given = ["testcases", "--input", str(problems), "--output", str(tmp_path / "out"), *arguments]
    assert main(given) == 2
    assert message in capsys.readouterr().err
