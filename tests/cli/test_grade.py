"""`rollmill grade`: lines in, the same lines with rewards out, and its complaints."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.forks import ForkedPopen

from rollmill.cli import main

ROWS: list[dict[str, Any]] = [
    {"response": "#### 72", "answer": "72", "extra": [1]},
    {"response": "the answer is 71", "answer": "72"},
    {"response": "\\boxed{\\sqrt{12}}", "answer": "2\\sqrt{3}", "id": "é"},
    {"response": "5"},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def test_lines_come_out_with_rewards(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["grade", "--reward", "math", "--input", str(rows), "--output", str(out), "--json"]) == 0
    graded = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["reward"] for row in graded] == [1.0, 0.0, 1.0, None]
    assert graded[0] == ROWS[0] | {"reward": 1.0, "parts": {"math": 1.0}, "outcomes": {"math": "ok"}}
    summary = json.loads(capsys.readouterr().out)
    assert (summary["count"], summary["judged"], summary["mean"]) == (4, 3, pytest.approx(2 / 3))
    assert summary["outcomes"] == {"ok": 3, "not_applicable": 1}


def test_standard_output_holds_only_lines(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "--reward", "exact", "--input", str(rows), "--option", "after=####"]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["reward"] for line in captured.out.splitlines()] == [1.0, 0.0, 0.0, None]
    assert "3 of 4" in captured.err
    assert "0.3333" in captured.err
    assert "no_answer" in captured.err


def test_means_by_subject_and_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [("B", "physics", 8), ("C", "physics", 9), ("B", "chemistry", 9)]
    rows = [
        {
            "response": f"The answer is {said}.",
            "answer": "B",
            "k12": {"type": "single", "subject": subject, "grade": grade},
        }
        for said, subject, grade in kinds
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    means = {"k12/physics": 0.5, "k12/chemistry": 1.0, "k12/grade-8": 1.0, "k12/grade-9": 0.5}
    assert main(["grade", "--reward", "k12", "--input", str(path), "--output", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["details"] == means
    assert main(["grade", "--reward", "k12", "--input", str(path)]) == 0
    table = capsys.readouterr().err
    assert all(re.search(rf"{name}\W+{mean:.4f}", table) for name, mean in means.items())


@pytest.mark.slow
def test_a_python_function_by_path(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "def long(task, completion, least): return {'long': len(completion.text) >= least, 'id': len(task.id)}"
    )
    argv = ["grade", "--reward", f"{code}:long", "--input", str(rows), "--option", "options={least: 10}"]
    assert main(argv) == 0
    graded = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["parts"] for row in graded] == [{"long/long": float(n), "long/id": 1.0} for n in (0, 1, 1, 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "rows.jsonl:1: not valid JSON"),
        ('{"response": "a"}\n[1]', "rows.jsonl:2: expected an object, found list"),
        ('{"response": "a"}\n\n{"answer": 1}', "rows.jsonl:3: has no `response`"),
        ('{"response": 5}', "rows.jsonl:1: `response` is int"),
        ("\n", "rows.jsonl: no lines to grade"),
    ],
)
def test_malformed_lines_are_named(
    rows: Path, tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_text(content)
    out = tmp_path / "out.jsonl"
    assert main(["grade", "--reward", "math", "--input", str(rows), "--output", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--reward", "maths"], "no reward `maths`; did you mean `math`?"),
        (["--reward", "math", "--option", "time_limit=3"], "did you mean `time_limit_s`?"),
        (["--reward", "math", "--option", "weight"], "expected key=value"),
        (["--reward", "math", "--option", "time_limit_s=-1"], "time_limit_s: Input should be greater than 0"),
        (["--reward", "format"], "reward `format`: give exactly one of pattern, tags, sections"),
        (["--reward", "nowhere.py:f"], "no such file"),
        ([], "give --reward NAME or --run FILE.yaml"),
        (["--reward", "math", "--run", "run.yaml"], "give --reward NAME or --run FILE.yaml"),
        (["--run", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_usage_says_what_to_do(
    rows: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grade", "--input", str(rows), *argv]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_used(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "--reward", "math", "--input", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err
    out = tmp_path / "no" / "out.jsonl"
    assert main(["grade", "--reward", "math", "--input", str(rows), "--output", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reward_that_raises_fails_the_command(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "bad.py"
    code.write_text("def bad(task, completion): raise KeyError('gold')")
    assert main(["grade", "--reward", f"{code}:bad", "--input", str(rows)]) == 1
    captured = capsys.readouterr()
    assert re.search(rf"reward `bad` failed on task `.`: KeyError: 'gold' \({re.escape(str(code))}:1\)", captured.err)
    assert captured.out == ""


def test_what_was_judged_before_a_failure_is_written(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_text("\n".join(json.dumps(row) for row in [*ROWS[:2], {"response": "5", "answer": " "}]) + "\n")
    out = tmp_path / "out.jsonl"
    assert main(["grade", "--reward", "math", "--input", str(rows), "--output", str(out)]) == 1
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.0, 0.0]
    error = capsys.readouterr().err
    assert "2 of 3 lines were scored and written" in error
    assert "failed on task `3`" in error
    before = rows.read_text()
    assert main(["grade", "--reward", "math", "--input", str(rows), "--output", str(rows)]) == 1
    assert rows.read_text() == before


RUN = """
taskset: {{path: {tasks}}}
model: {{new: {{hidden_size: 64, layers: 1, heads: 2, context: 512, tokenizer: {{kind: char}}}}}}
rewards:
  - {{name: format, pattern: "^<a>", gate: {{at_least: 1, otherwise: -1}}, weight: 0}}
  - {{name: exact, after: "<a>"}}
  - {{name: python, function: "{code}:shortest"}}
reward_settings: {{clip: [-1, 1.5]}}
"""


@pytest.mark.slow
def test_the_rewards_of_a_run_file_on_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, run, rows, out = (tmp_path / name for name in ("mine.py", "run.yaml", "rows.jsonl", "out.jsonl"))
    code.write_text(
        "def shortest(task, completions):\n"
        "    least = min(len(each.text) for each in completions)\n"
        "    return [float(len(each.text) == least) for each in completions]\n"
        "shortest.group = True\n"
    )
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"prompt": "a", "answer": "5"}) + "\n")
    run.write_text(RUN.format(code=code, tasks=tasks))
    responses = [("<a>5", "x"), ("<a>55", "x"), ("5", "y"), ("<a>5", "y"), ("<a>6", "z")]
    rows.write_text("".join(json.dumps({"response": r, "answer": "5", "group": g}) + "\n" for r, g in responses))
    argv = ["grade", "--run", str(run), "--input", str(rows), "--output", str(out)]
    assert main([*argv, "--json"]) == 0
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.5, 0.0, -1.0, 1.0, 1.0]
    summary = json.loads(capsys.readouterr().out)
    assert summary["parts"]["exact"] == {"judged": 4, "mean": 0.5}
    assert summary["rewards"]["exact"]["outcomes"] == {"ok": 4, "gated": 1}
    assert main(argv) == 0
    table = capsys.readouterr().err
    assert re.search(r"exact +│ +4 +│ +0.5000", table)
    assert re.search(r"exact +│ +ok 4, gated 1", table)


def test_half_a_surrogate_pair_is_written_as_an_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    row = {"response": "é \ud83d 5", "answer": "é \ud83d 5", "id": "\udcff"}
    rows.write_text(json.dumps(row) + "\n")
    assert main(["grade", "--reward", "exact", "--input", str(rows), "--output", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "é \\ud83d 5" in text
    assert json.loads(text) == row | {"reward": 1.0, "parts": {"exact": 1.0}, "outcomes": {"exact": "ok"}}


@pytest.mark.slow
def test_a_file_is_kept_until_there_is_something_to_write(rows: Path, tmp_path: Path) -> None:
    before = rows.read_text()
    code = tmp_path / "bad.py"
    code.write_text("def bad(task, completion): raise KeyError('gold')")
    assert main(["grade", "--reward", f"{code}:bad", "--input", str(rows), "--output", str(rows)]) == 1
    assert rows.read_text() == before
    assert main(["grade", "--reward", "exact", "--input", str(rows), "--output", str(rows)]) == 0
    assert [json.loads(line)["response"] for line in rows.read_text().splitlines()] == [row["response"] for row in ROWS]


def test_lines_of_a_group_are_judged_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = tmp_path / "meet.py", tmp_path / "rows.jsonl"
    code.write_text(
        "import asyncio\n"
        "both = []\n"
        "async def meet(task, completion):\n"
        "    both.append(1)\n"
        "    while len(both) < 2:\n"
        "        await asyncio.sleep(0.01)\n"
        "    return 1.0\n"
    )
    rows.write_text('{"response": "a", "group": "x"}\n{"response": "b", "group": "x"}\n')
    argv = ["grade", "--reward", f"{code}:meet", "--input", str(rows), "--option", "time_limit_s=10"]
    assert main(argv) == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [1.0, 1.0]


@pytest.mark.slow
def test_no_process_is_left_behind_by_ctrl_c(tmp_path: Path) -> None:
    code, rows, out = tmp_path / "slow.py", tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    code.write_text(
        f"import os, time\ndef slow(task, completion):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + ' ')\n    time.sleep(60)\n"
    )
    rows.write_text('{"response": "a"}\n')
    command = [sys.executable, "-m", "rollmill", "grade", "--reward", f"{code}:slow", "--input", str(rows)]
    command += ["--output", str(out), "--option", "time_limit_s=50"]
    run = ForkedPopen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().endswith(" "):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130
    assert said.strip().endswith("interrupted")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


GROUPWISE = """
def count(task, completions):
    return [float(len(completions)) for _ in completions]
count.group = True
"""


@pytest.mark.slow
def test_a_group_has_one_question_and_no_group_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    code.write_text(GROUPWISE)
    argv = ["grade", "--reward", f"{code}:count", "--input", str(rows)]
    lines = [{"response": "a", "group": 1}, {"response": "b", "group": 1}, {"response": "c", "group": "2"}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(argv) == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [2, 2, 1]
    rows.write_text("".join(json.dumps(line | {"group": None}) + "\n" for line in lines))
    assert main(argv) == 1
    assert "score the whole group" in capsys.readouterr().err
    for key in ("prompt", "answer"):
        rows.write_text("".join(json.dumps(line | {key: line["response"]}) + "\n" for line in lines))
        assert main(argv) == 2
        assert "group `1`: `1` and `2` differ in `prompt` or `answer`" in capsys.readouterr().err
        assert main([*argv[:2], "exact", *argv[3:]]) == 0  # nothing is compared
        capsys.readouterr()
