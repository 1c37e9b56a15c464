"""`rollmill tasks answer`: what a served model solves becomes demonstrations that a run imitates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chat_server import Answer, chat_server, failing
from support.tiny import GRPO, SFT, tiny_run

import rollmill
from rollmill.cli import main

TASKS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(6)]


def teacher(body: dict[str, Any]) -> Answer | str:
    """Knows the sums up to 4, right in a long and a short way, or wrong, by the seed; does not take the last."""
    [message] = body["messages"]
    number = int(message["content"][0])
    if number == 5:
        return failing(400, "no fives", "content_filter")
    sum_ = number + 1 if number < 4 else 0
    return [f"it is {sum_}", f"{sum_}", "no"][body["seed"] % 3]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASKS))
    tasks = {"path": str(tmp_path / "tasks.jsonl"), "function": None, "options": None}
    rewards = [{"name": "math", "extract": "last_number"}]
    return tiny_run(tmp_path, taskset=tasks, rewards=rewards, evaluation=None, stages=[GRPO])


def described(folder: Path, url: str) -> Path:
    path = folder / "teacher.yaml"
    path.write_text(yaml.safe_dump({"endpoint": url, "model": "big"}))
    return path


@pytest.mark.slow
def test_what_a_teacher_solves_is_imitated(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "solved.jsonl"
    with chat_server(teacher) as server:
        argv = ["tasks", "answer", str(run_file), "--by", str(described(tmp_path, server.url)), "--out", str(out)]
        assert main([*argv, "--samples", "8"]) == 0
        assert len(server.requests) == 6 * 8
        assert len({body["seed"] for body in server.requests}) == 6 * 8
        told = capsys.readouterr()
        assert f"{out}: 5 of 6 tasks answered, 4 of them right" in told.out
        assert "no answer to 1 tasks (tasks:5)" in told.out
        assert main([*argv, "--samples", "8"]) == 0
        assert len(server.requests) == 6 * 8 + 8  # what was answered is not asked again
        assert main([*argv, "--samples", "2"]) == 2
        assert "rated with other settings" in capsys.readouterr().err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["prompt"]: row["response"] for row in rows} == {
        **{f"{n}+1=": str(n + 1) for n in range(4)},
        "4+1=": None,
    }
    assert [row["success_rate"] > 0 for row in rows] == [row["response"] is not None for row in rows]
    tasks = {"path": str(out), "function": None, "options": None}
    alone = {"evaluation": None, "rewards": None, "rollout": None, "stages": None, "trainer": SFT["trainer"]}
    folder = tmp_path / "imitates"
    folder.mkdir()
    imitates = tiny_run(folder, taskset=tasks, steps=2, algorithm={"name": "sft", "batch": 4}, **alone)
    rollmill.run(imitates, out=folder / "out")
    steps = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2]


def test_a_teacher_that_is_not_there(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = described(tmp_path, "http://127.0.0.1:9/v1")
    file.write_text(file.read_text() + "tries: 1\n")
    out = str(tmp_path / "solved.jsonl")
    assert main(["tasks", "answer", str(run_file), "--by", str(file), "--out", out]) == 1
    assert "no connection" in capsys.readouterr().err
    assert main(["tasks", "answer", str(run_file), "--by", str(tmp_path / "none.yaml"), "--out", out]) == 2
    assert "none.yaml: no such file; write one with the `endpoint` of a server" in capsys.readouterr().err
