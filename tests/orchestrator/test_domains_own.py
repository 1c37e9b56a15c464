"""What a domain has of its own in a run: environment, tools and models; its pauses, staleness and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_server import chat_server
from support.domain_runs import domains_of, rollouts, rows, run_file

import rollmill
from rollmill.errors import WorkflowError
from rollmill.launch import evaluate
from rollmill.orchestrator.metrics import domain_metrics
from rollmill.types import Experience

CORRIDOR = """
import rollmill
from rollmill.rollout.environments import StepResult


@rollmill.environment
class Corridor:
    def reset(self, task, seed):
        self.at = 0
        return f"{task.prompt} 0"

    def step(self, action):
        self.at += 1
        return StepResult(f"at {self.at}", reward=0.25, done=self.at == 3)
"""


def test_a_domain_has_an_environment_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "corridor.py").write_text(CORRIDOR)
    words = {"workflow": "environment", "environment": {"name": "Corridor"}, "rewards": None, "pipeline": None}
    words |= {"taskset": {"path": "words.jsonl"}, "rollout": {"group_size": 3, "max_new_tokens": 3}}
    path = run_file(tmp_path, domains_of(tmp_path, **words), plugins=["corridor.py"], evaluation=None, steps=2)
    rollmill.run(path, [], tmp_path / "run")
    episodes = {row["task_id"].partition("/")[0]: row for row in rollouts(tmp_path / "run")}
    assert episodes["words"]["reward"] == 0.75
    assert set(episodes["add"]["reward_parts"]) == {"exact"}
    assert any("domain/words/reward" in row for row in rows(tmp_path / "run", "metrics.jsonl"))


STOP = {"metric": "eval/words/greedy", "patience": 3}
MAZE = """
import rollmill
from pathlib import Path
from rollmill.rollout.environments import StepResult

HERE = Path(__file__).parent


@rollmill.environment
class Maze:
    def reset(self, task, seed):
        self.length = 0
        if (HERE / "gone").exists():
            raise OSError("the maze is gone")
        return task.prompt

    def step(self, action):
        (HERE / "calls").open("a").write(".")
        if (HERE / "calls").stat().st_size > LAST:
            (HERE / "gone").touch()
        return StepResult("end", reward=float(len(action) % 2), done=True)
"""


def run_with_maze(folder: Path, last: int, **changes: Any) -> Path:
    """Write a run whose domain `words` acts in an environment that fails for good after `last` steps."""
    (folder / "maze.py").write_text(MAZE.replace("LAST", str(last)))
    words = {"workflow": "environment", "environment": {"name": "Maze"}, "rewards": None, "pipeline": None}
    words |= {"rollout": {"group_size": 3, "max_new_tokens": 3}, "evaluation": {"taskset": {"path": "words.jsonl"}}}
    mixing = {"pause_s": 1000}
    path = run_file(folder, domains_of(folder, **words), plugins=["maze.py"], mixing=mixing, **changes)
    return path


@pytest.mark.parametrize("since", ["the start", "the second step"])
def test_a_domain_whose_environment_fails_is_paused_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, since: str
) -> None:
    """Two groups of 3 episodes are rolled out in a step, and their evaluation begins at once or after two steps."""
    evaluation = {"every": 2, "at_start": since == "the start"}
    path = run_with_maze(tmp_path, 10, evaluation=evaluation, early_stop=STOP)
    if since == "the start":
        (tmp_path / "gone").touch()
    found = rollmill.run(path, [], tmp_path / "run")
    assert "domain words is paused for 1000 s (pause 1 of 8 in a row): workflow `environment` failed" in caplog.text
    assert "OSError: the maze is gone" in caplog.text
    assert "add go on" in caplog.text
    assert "the evaluation of words is left out this time, as domain words is paused" in caplog.text
    last = [row for row in rows(tmp_path / "run", "metrics.jsonl") if "loss" in row][-1]
    assert (last["step"], last["tasks/words/paused"], last["domain/add/groups"]) == (6, 1, 6)
    assert "domain/words/groups" not in last
    assert all("eval/add/greedy" in each for each in found["evaluations"])
    assert not any("eval/words/greedy" in each for each in found["evaluations"])
    assert found["accuracy_after"] == found["evaluations"][-1]["eval/add/greedy"]


def test_a_checkpoint_is_not_evaluated_without_a_domain_whose_environment_fails(tmp_path: Path) -> None:
    path = run_with_maze(tmp_path, 10_000, steps=1)
    rollmill.run(path, [], tmp_path / "run")
    (tmp_path / "gone").touch()
    with pytest.raises(WorkflowError, match="the maze is gone"):
        evaluate(tmp_path / "run")


ABACUS = """
import rollmill


@rollmill.tool
def abacus(text: str) -> str:
    "The length of a text."
    return str(len(text))


@rollmill.workflow
async def counted(task, policy, tools):
    reply = await policy.complete(task.prompt, max_new_tokens=3)
    found = await tools.call("abacus", {"text": reply.text})
    return {"counted": float(found.content == str(len(reply.text)))}
"""


def test_a_domain_has_tools_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "abacus.py").write_text(ABACUS)
    words = {"workflow": "counted", "tools": ["abacus"], "rewards": None, "pipeline": None}
    path = run_file(tmp_path, domains_of(tmp_path, **words), plugins=["abacus.py"], evaluation=None, steps=2)
    rollmill.run(path, [], tmp_path / "run")
    run = tmp_path / "run"
    found = {(row["task_id"].partition("/")[0], row["reward_parts"].get("counted")) for row in rollouts(run)}
    assert found == {("add", None), ("words", 1.0)}
    steps = [row for row in rows(run, "metrics.jsonl") if "loss" in row]
    assert len(steps) == 2
    made = [(row["tools/abacus/calls"], row["tools/abacus/errors"]) for row in steps]
    assert made == [(row["domain/words/completions"], 0) for row in steps]  # one call each, and none by `add`


ASKING = """
import rollmill


@rollmill.workflow
async def asking(task, policy, helper, rival):
    mine = await policy.complete(task.prompt, max_new_tokens=3)
    theirs = await rival.complete(task.prompt)
    advice = await helper.chat([{"role": "user", "content": mine.text or "nothing"}])
    return {"advice": float(advice.text == "well done"), "rival": float(theirs.completion.token_ids.size)}
"""


def test_a_domain_has_models_of_its_own(tmp_path: Path) -> None:
    """One behind an endpoint and one served in this process, the policy as it was at the start."""
    (tmp_path / "asking.py").write_text(ASKING)
    with chat_server(lambda body: "well done") as server:
        models = {"helper": {"endpoint": server.url, "model": "m"}, "rival": {"policy": "initial", "max_new_tokens": 1}}
        words = {"workflow": "asking", "models": models, "rewards": None, "pipeline": None}
        path = run_file(tmp_path, domains_of(tmp_path, **words), plugins=["asking.py"], evaluation=None, steps=2)
        rollmill.run(path, [], tmp_path / "run")
        asked = len(server.requests)
    parts = [row["reward_parts"] for row in rollouts(tmp_path / "run") if row["task_id"].startswith("words/")]
    assert parts == [{"advice": 1.0, "rival": 1.0}] * asked
    assert asked == 12  # 2 steps with 2 groups of 3


HALF = """
def half(task, completion):
    "Judges every second task only."
    return float(len(completion.text) % 2) if int(task.id.rpartition(":")[2]) % 2 else None
"""


def test_staleness_and_failures_are_those_of_each_domain(tmp_path: Path) -> None:
    """One step ahead: what is learned from is a version old, but in the first step; half of `words` has no verdict."""
    (tmp_path / "half.py").write_text(HALF)
    half = {"name": "python", "function": "half.py:half", "run_in": "thread"}
    words = {"rewards": [half], "pipeline": None}
    path = run_file(tmp_path, domains_of(tmp_path, **words), max_staleness=1, evaluation=None, steps=4)
    rollmill.run(path, [], tmp_path / "run")
    steps = [row for row in rows(tmp_path / "run", "metrics.jsonl") if "loss" in row]
    for name in ("add", "words"):
        assert [row[f"domain/{name}/staleness"] for row in steps] == [0, 1, 1, 1]
    assert [row["domain/add/failed"] for row in steps] == [0, 0, 0, 0]
    for row in steps:
        own = rows(tmp_path / "run", f"rollouts/step-{row['step']:06d}.jsonl")
        odd = [int(each["task_id"][-1]) % 2 for each in own if each["task_id"].startswith("words/")]
        assert row["domain/words/failed"] == pytest.approx(1 - sum(odd) / len(odd))
    assert any(row["domain/words/failed"] > 0 for row in steps)


def test_staleness_is_the_mean_over_a_domains_completions_and_failed_their_share() -> None:
    def experience(domain: str, number: int, version: int, reward: float | None) -> Experience:
        return Experience(
            f"{domain}-{number}",
            f"{domain}/task:0",
            domain,
            token_ids=np.array([1, 2, 3], np.int32),
            action_mask=np.array([False, True, True]),
            logprobs=np.zeros(3, np.float32),
            versions=np.array([-1, version, version + 1], np.int32),
            reward=reward,
        )

    add = [experience("add", 0, 4, 1.0), experience("add", 1, 2, None)]
    words = [experience("words", number, 1, None if number else 0.0) for number in range(4)]
    found = domain_metrics([*add, *words], 5)
    assert (found["domain/add/staleness"], found["domain/words/staleness"]) == (2, 4)  # since the oldest token
    assert (found["domain/add/failed"], found["domain/words/failed"]) == (0.5, 0.75)
