"""`rollmill tasks`: rates of a policy and of a judge, files that are gone on with, and what is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.chat_server import chat_server, shown
from support.tiny import tiny_run

from rollmill.cli import main
from rollmill.config.taskset import TasksetConfig
from rollmill.data import load_taskset

TASKS = {"function": "rollmill.quickstart.addition:rows", "options": {"size": 10, "seed": 1, "digits": 2}}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that solves nothing, but makes differing completions."""
    folder = tmp_path_factory.mktemp("model")
    sft = {"name": "sft", "batch": 4}
    run = tiny_run(folder, stages=None, algorithm=sft, steps=1, evaluation=None, rewards=None, rollout=None)
    assert main(["run", str(run), "--out", str(folder / "out")]) == 0
    return next((folder / "out" / "checkpoints").glob("step-*"))


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """Half of the completions are successes: their first sign is one of five digits or a sign before them."""
    rewards = [{"name": "format", "pattern": "[0-4 ].*"}]
    return tiny_run(tmp_path, stages=None, model={"path": str(model)}, taskset=TASKS, evaluation=None, rewards=rewards)


def score(run: Path, out: Path, *more: str) -> int:
    samples = () if "judge" in more else ("--samples", "4")
    return main(["tasks", "score", str(run), "--out", str(out), *samples, *more])


def test_success_rates_of_the_policy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rated.jsonl"
    assert score(run, out) == 0
    assert f"{out}: 10 of 10 tasks rated" in capsys.readouterr().out
    rows = read(out)
    assert [row["id"] for row in rows] == [f"rows:{number}" for number in range(10)]
    for row in rows:
        assert row["success_rate"] in (0, 0.25, 0.5, 0.75, 1)
        assert row["difficulty"] == 1 - row["success_rate"]
        assert row["mean_reward"] == row["success_rate"]
        assert (row["scored"]["by"], row["scored"]["samples"]) == ("policy", 4)
    assert len({row["success_rate"] for row in rows}) > 1
    loaded = load_taskset(TasksetConfig.model_validate({"path": out, "fields": {"id": "id"}}))
    original = load_taskset(TasksetConfig.model_validate(TASKS))
    for one, other in zip(loaded.tasks, original.tasks, strict=True):
        assert (one.id, one.prompt, one.answer, one.response) == (other.id, other.prompt, other.answer, other.response)
    rated = {**TASKS, "pipeline": [{"name": "difficulty", "scores": out}], "sampler": "easy_to_hard"}
    difficulties = [task.metadata["difficulty"] for task in load_taskset(TasksetConfig.model_validate(rated)).tasks]
    assert difficulties == [row["difficulty"] for row in rows]


def test_a_file_is_gone_on_with(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rated.jsonl"
    assert score(run, out) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    marked = lines[0].replace(b'"mean_reward": ', b'"mean_reward": 7')
    out.write_bytes(marked + b"".join(lines[1:6]) + lines[6][:50])  # killed while it wrote the seventh
    assert score(run, out) == 0
    assert out.read_bytes() == marked + b"".join(lines[1:])
    capsys.readouterr()
    assert score(run, out, "--set", "rollout.temperature=0.5") == 2
    assert re.search(r"rated.jsonl:1: rated with other settings \(by policy.*; now by policy", capsys.readouterr().err)
    assert score(run, out, "--set", "taskset.options.seed=2") == 2
    assert "task rows:0 has a different prompt in the taskset" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["my notes", '{"prompt": "a"}\n', "notes\nmore"])
def test_a_file_of_something_else_is_left_alone(
    content: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "other.jsonl"
    out.write_text(content)
    assert score(run, out) == 2
    assert "choose another file" in capsys.readouterr().err
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model": {"path": "new"}}, [], "model.path is `new`, and a model without training solves nothing; name the"),
        ({"rewards": None}, [], "needs at least one reward"),
        ({}, ["--by", "judge"], "stage train has no reward that asks a language model; give --endpoint and --model"),
        ({}, ["--endpoint", "http://localhost:1/v1"], "--endpoint and --model are honoured only with --by judge"),
        ({}, ["--by", "judge", "--model", "m"], "--endpoint and --model: give either endpoint"),
        ({}, ["--by", "judge", "--samples", "2"], "--samples is honoured only with --by policy; remove it"),
        ({}, ["--stage", "x"], "no stage `x` in"),
    ],
)
def test_wrong_ways_to_score(
    changes: dict[str, Any],
    options: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base: dict[str, Any] = {"stages": None, "taskset": TASKS, "evaluation": None, "model": {"path": str(model)}}
    assert score(tiny_run(tmp_path, **(base | changes)), tmp_path / "out.jsonl", *options) == 2
    assert message in capsys.readouterr().err


def test_tasks_that_no_reward_applies_to_are_named_and_the_others_rated(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def mine(task, completion):\n    return None if task.id == 'rows:3' else 1.0\n")
    rewards = [{"name": "python", "function": f"{tmp_path / 'mine.py'}:mine", "run_in": "thread"}]
    base: dict[str, Any] = {"stages": None, "taskset": TASKS, "evaluation": None, "model": {"path": str(model)}}
    out = tmp_path / "rated.jsonl"
    assert score(tiny_run(tmp_path, **base, rewards=rewards), out) == 0
    captured = capsys.readouterr()
    assert f"{out}: 9 of 10 tasks rated" in captured.out
    assert "no verdict for 1 tasks (rows:3); run the command again" in captured.out
    assert captured.err.splitlines()[-1] == "9 of 10 tasks rated"
    assert "rows:3" not in [row["id"] for row in read(out)]


def test_difficulty_as_a_judge_sees_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rated.jsonl"

    def script(body: dict[str, Any]) -> str:
        a, b = map(int, re.findall(r"(\d+)\+(\d+)", shown(body))[0])
        return "I cannot tell." if a + b < 60 else f'Some columns.\n{{"difficulty": {min((a + b) // 20, 10)}}}'

    with chat_server(script) as server:
        assert score(run, out, "--by", "judge", "--endpoint", server.url, "--model", "m") == 0
        asked = [shown(body) for body in server.requests]
    rows = read(out)
    sums = {row["id"]: sum(map(int, row["prompt"].split("+"))) for row in rows}
    assert len(rows) > 3
    assert [row["difficulty"] for row in rows] == [sums[row["id"]] // 20 / 10 for row in rows]
    assert all("success_rate" not in row for row in rows)
    without = 10 - len(rows)
    assert without > 0
    assert f"no verdict for {without} tasks (rows:" in capsys.readouterr().out
    assert all("How difficult" in text for text in asked)
    answers = {task.prompt: task.answer for task in load_taskset(TasksetConfig.model_validate(TASKS)).tasks}
    assert not any(
        answer in text for prompt, answer in answers.items() for text in asked if str(prompt).strip() in text
    )
    with chat_server(['{"difficulty": 1}']) as server:
        assert score(run, out, "--by", "judge", "--endpoint", server.url, "--model", "m") == 0
        assert len(server.requests) == without, "rows in the file are not asked again"
    assert len(read(out)) == 10


def test_show_prints_the_pipeline_and_a_histogram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{n % 15}?", "level": n % 4} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taskset = {
        "function": None,
        "options": None,
        "path": str(tmp_path / "t.jsonl"),
        "pipeline": ["deduplicate", {"name": "difficulty", "column": "level", "range": [0, 3]}],
    }
    run = tiny_run(tmp_path, taskset={key: value for key, value in taskset.items() if value is not None})
    text = run.read_text().replace("  function: rollmill.quickstart.addition:rows\n", "", 1)
    run.write_text(re.sub(r"  options:\n    size: 300\n    seed: 1\n    digits: 2\n", "", text, count=1))
    assert main(["tasks", "show", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "stage repair: 15 tasks of t, 5 left out: 5 deduplicate: duplicate",
        "  taskset t: deduplicate: 15 of 20 tasks kept, 5 dropped (duplicate 5)",
        "  taskset t: difficulty: 15 of 15 tasks kept, 15 changed (rated 15)",
        "difficulty",
    ]
    assert lines[4] == "       0 to    0.1        4  " + "#" * 40
    assert main(["tasks", "show", str(run), "--json", "--column", "level"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [count for *_, count in found["histogram"] if count] == [4, 4, 4, 3]
    assert found["pipeline"][0] == {
        "taskset": "t",
        "operator": "deduplicate",
        "seen": 20,
        "kept": 15,
        "changed": {},
        "dropped": {"duplicate": 5},
    }
    assert main(["tasks", "show", str(run), "--column", "nothing"]) == 0
    assert "no task has a number in the column nothing" in capsys.readouterr().out
