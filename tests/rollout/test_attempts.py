"""Rollouts that fail, are late or are rejected: tried again, counted, replaced, or the end of the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from support.tiny import merged, tiny_run

import rollmill
from rollmill.errors import PipelineError, RewardError, WorkflowError
from rollmill.launch import run
from rollmill.trackers import read_metrics
from rollmill.trackers.run_views import PlainView
from rollmill.types import Experience

RL: dict[str, Any] = {
    "stages": None,
    "algorithm": {"name": "grpo"},
    "trainer": {"lr": 1e-3},
    "evaluation": None,
    "steps": 2,
    "rewards": None,
    "workflow": "solve",
    "plugins": ["flow.py"],
}
HEAD = """
import asyncio
from collections import Counter
import rollmill
from rollmill.errors import EpisodeError

tries = Counter()

def try_of(task, policy):
    tries[task.id, policy._index] += 1
    return tries[task.id, policy._index]

@rollmill.workflow
async def solve(task, policy):
    number = try_of(task, policy)
    reply = await policy.complete(task.prompt)
"""


def started(folder: Path, body: str, **changes: Any) -> Path:
    (folder / "flow.py").write_text(HEAD + body)
    run(tiny_run(folder, **merged(RL, changes)), out=folder / "out", view=PlainView(io.StringIO()))
    return folder / "out"


def learned(out: Path) -> list[Experience]:
    return [each for step in (1, 2) for each in rollmill.load_experiences(out, step)]


def total(out: Path, key: str) -> float:
    return sum(row.get(key, 0) for row in read_metrics(out))


def test_a_failed_try_leaves_nothing_behind_and_the_next_draws_anew(tmp_path: Path) -> None:
    body = """
    if number == 1:
        raise EpisodeError("the game is gone")
    return 1.0
"""
    out = started(tmp_path, body, rollout={"attempts": 2})
    plain = tmp_path / "plain"
    plain.mkdir()
    undisturbed = learned(started(plain, "\n    return 1.0\n"))
    found = learned(out)
    assert len(found) == 32
    for each in found:
        assert [turn.role for turn in each.turns] == ["prompt", "assistant"]
        assert each.reward == 1.0
    assert [each.response for each in found] != [each.response for each in undisturbed]
    assert total(out, "rollout/retries") == total(out, "rollout/failed/environment") == total(out, "rollout/failed") > 0
    assert total(out, "rollout/rejected") == 0


@pytest.mark.slow
def test_what_is_late_is_aborted_and_tried_again(tmp_path: Path) -> None:
    body = """
    if number == 1 and policy._index == 2:
        await asyncio.sleep(60)
    return float("1" in reply.text)
"""
    out = started(tmp_path, body, rollout={"attempts": 9, "time_limit_s": 0.7})
    assert total(out, "rollout/late") == total(out, "rollout/failed") == total(out, "rollout/retries") >= 8
    assert len(learned(out)) == 32


def test_calls_to_the_engine_end_with_the_try(tmp_path: Path) -> None:
    """What takes longer than a try is aborted, and the error says where it waited."""
    said = r"on task `rows:.*`, rollout \d \(2 tries\): .*flow.py:16: it took longer than rollout.time_limit_s"
    with pytest.raises(WorkflowError, match=said):
        started(tmp_path, "\n    return 1.0\n", rollout={"attempts": 2, "time_limit_s": 1e-6})


def test_the_last_failure_ends_the_run(tmp_path: Path) -> None:
    body = "\n    return 1 / 0\n"
    said = r"(?s)`solve` failed on task `.*`, rollout \d \(3 tries\): .*flow.py:18: ZeroDivisionError.*rollout.failures"
    with pytest.raises(WorkflowError, match=said):
        started(tmp_path, body, rollout={"attempts": 3})


def test_rejected_rollouts_are_not_learned_from(tmp_path: Path) -> None:
    body = """
    if policy._index == 0:
        raise ValueError("no")
    return None if policy._index == 1 else 1.0
"""
    out = started(tmp_path, body, rollout={"failures": "reject"})
    assert [int(each.id.rpartition("/")[2]) for each in learned(out)] == [2, 3] * 8
    assert total(out, "rollout/rejected") == 16
    assert total(out, "rollout/failed/workflow") == 8
    assert all(row["completions"] == 8 for row in read_metrics(out))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_another_task_takes_the_place_of_a_group_that_was_rejected(tmp_path: Path, max_staleness: int) -> None:
    body = """
    return None if int(task.id.rpartition(":")[2]) % 2 else 1.0
"""
    out = started(tmp_path, body, max_staleness=max_staleness)
    assert all(int(each.task_id.rpartition(":")[2]) % 2 == 0 for each in learned(out))
    assert len({each.group for each in learned(out)}) == 8
    assert total(out, "rollout/empty_groups") > 0
    assert total(out, "rollout/rejected") == 4 * total(out, "rollout/empty_groups")


def test_a_workflow_that_rejects_everything_ends_the_run(tmp_path: Path) -> None:
    said = r"nothing was left of 8 groups .* `solve` rejected all of 8 groups \(32 none\)"
    with pytest.raises(PipelineError, match=said):
        started(tmp_path, "\n    return None\n", rollout={"refills": 1})


def test_a_workflow_that_never_asks_the_policy_ends_the_run(tmp_path: Path) -> None:
    never = HEAD.replace("    reply = await policy.complete(task.prompt)\n", "    return 1.0\n")
    (tmp_path / "never.py").write_text(never)
    with pytest.raises(PipelineError, match=r"rejected all of 8 groups \(8 the policy was never asked\)"):
        run(
            tiny_run(tmp_path, **merged(RL, {"plugins": ["never.py"], "rollout": {"refills": 1}})),
            out=tmp_path / "out",
            view=PlainView(io.StringIO()),
        )


def test_steps_with_rewards_need_no_answer(tmp_path: Path) -> None:
    out = started(tmp_path, "\n    policy.step(0.5)\n", algorithm={"name": "stepwise_grpo"})
    assert {each.reward for each in learned(out)} == {0.5}


@pytest.mark.parametrize("group", [False, True])
def test_rewards_are_never_tried_again(tmp_path: Path, group: bool) -> None:
    code = "raise ExceptionGroup('both', [KeyError('x'), RewardError('broken judge')])"
    body = f"""
    from rollmill.errors import RewardError
    {code if group else "raise RewardError('broken judge')"}
"""
    with pytest.raises(RewardError, match="broken judge"):
        started(tmp_path, body, rollout={"attempts": 3, "failures": "reject"})


def test_an_answer_that_is_no_reward_is_never_tried_again(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="expected a number, a mapping of numbers or None"):
        started(tmp_path, "\n    return 'good'\n", rollout={"attempts": 3, "failures": "reject"})


def test_over_sampling_with_a_workflow_loses_no_task(tmp_path: Path) -> None:
    out = started(tmp_path, "\n    return float('1' in reply.text)\n", rollout={"oversample": 0.5}, steps=2)
    assert len(learned(out)) == 32
    assert total(out, "rollout/stopped") == 4
    assert len({each.task_id for each in learned(out)}) == 8
