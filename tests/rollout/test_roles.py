"""Roles of the run file: rewards that score the replies in one role, and what a workflow returns for each."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import GRPO, HELD_OUT, metrics, tiny_run
from support.toys import toy_tokenizer

import rollmill
from rollmill.cli import main
from rollmill.config.loader import load_run
from rollmill.config.rollout import RolloutConfig
from rollmill.config.workflows import RoleConfig
from rollmill.engines.base import GenerationRequest
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rewards import build_reward_manager
from rollmill.rewards.builtin.python import PythonReward
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.resources import WorkflowResources
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.rollout.workflow import Workflow, WorkflowFunction
from rollmill.trackers.rollout_log import load_experiences
from rollmill.types import Completion, Experience, StopReason, Task

PLUGIN = """
import rollmill

@rollmill.workflow
async def ask(task, policy, judge):
    asked = await policy.role("proposer").complete(task.prompt, max_new_tokens=3)
    answered = await policy.role("solver").complete(task.prompt + asked.text, max_new_tokens=4)
    return {"solver": await judge(answered), "proposer": (await judge(asked), {"bonus": 0.25})}

def short(task, completion):
    return 1.0 - len(completion.text) / 8

def many(task, completion):
    return float(len(completion.text))

def rank(task, completions):
    order = sorted(range(len(completions)), key=lambda index: completions[index].text)
    return [order.index(index) / 10 for index in range(len(completions))]

rank.group = True
"""
REWARDS = [
    {"name": "python", "function": "plugin.py:short", "role": "proposer"},
    {"name": "python", "function": "plugin.py:many", "role": "solver"},
    {"name": "python", "function": "plugin.py:rank", "role": "solver"},
    {"name": "python", "function": "plugin.py:many", "weight": 0.5},
]
BASE: dict[str, Any] = {
    "stages": None,
    "plugins": ["plugin.py"],
    "workflow": "ask",
    "roles": {"proposer": {"learn": False}, "solver": {}},
    "rewards": REWARDS,
    "evaluation": None,
    "algorithm": {"name": "grpo"},
}


def test_each_role_is_scored_by_its_rewards_and_those_of_all(tmp_path: Path) -> None:
    """Also the rewards that compare a group, and in an evaluation, where one role's reward decides."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    evaluation = {"taskset": HELD_OUT, "every": 2, "at_start": False, "threshold": 0.25, "role": "proposer"}
    changes = {"steps": 2, "rollout": {"batch": 2}, "evaluation": evaluation}
    rollmill.run(tiny_run(tmp_path, **BASE | GRPO | changes), out=tmp_path / "run")
    found = load_experiences(tmp_path / "run")
    by_role: dict[str, list[Experience]] = {"proposer": [], "solver": []}
    for each in found:
        by_role[each.role].append(each)
    assert len(by_role["proposer"]) == len(by_role["solver"]) == 16
    for each in by_role["proposer"]:
        length = len(each.response)
        assert each.reward_parts == {"short": 1 - length / 8, "many#2": float(length), "bonus": 0.25}
        assert each.reward == pytest.approx(1 - length / 8 + length / 2 + 0.25)
        assert each.action_tokens == 0  # learn: false
    for each in by_role["solver"]:
        assert each.reward_parts.keys() == {"many", "many#2", "rank"}
        assert each.action_tokens > 0
    for group in {each.group for each in found}:
        ranks = [each.reward_parts["rank"] for each in by_role["solver"] if each.group == group]
        assert sorted(ranks) == [0.0, 0.1, 0.2, 0.3]
    line = metrics(tmp_path / "run")[-1]
    assert line["role/proposer/completions"] == line["role/solver/completions"] == 8
    assert line["eval/greedy"] == line["eval/sampled"] == 1.0  # every proposer earns that much, one attempt a rollout
    [log] = (tmp_path / "run/evaluations").glob("*.json")
    assert all(len(task["rewards"]) == 1 for task in json.loads(log.read_text())["sets"][0]["tasks"])


class Echo:
    """An engine whose every completion is one token."""

    version = 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        prompt, ids, zeros = np.array(request.prompt_ids, np.int32), np.array([40], np.int32), np.zeros(1, np.float32)
        return [Completion(prompt, ids, zeros, ids * 0, zeros, "a", StopReason.EOS, 0, 0)]


def rolled_out(solve: WorkflowFunction, *, rewarded: str | None = None, **roles: dict[str, Any]) -> list[Experience]:
    """One rollout by a workflow with `judge`: 0.5 for the replies in the role `rewarded`, or in all."""
    reward = PythonReward(name="python", function=f"{__file__}:half", role=rewarded, run_in="thread")
    declared = {name: RoleConfig(**options) for name, options in roles.items()}
    engine: Any = Echo()
    with build_reward_manager([reward]) as manager:
        workflow = Workflow("solve", solve, {"judge": WorkflowResources(manager).sources["judge"]})
        attempts = RetryingWorkflow(workflow, RolloutConfig())
        chat = ChatRenderer(toy_tokenizer(), frozenset())
        runner = WorkflowRunner(attempts, engine, chat, manager, None, declared)
        return asyncio.run(runner.group(Task(id="t", prompt="1"), RolloutConfig(), n=1, seed=0, group="g"))


def half(task: Task, completion: Completion) -> float:
    return 0.5


async def each_moves(policy: Policy) -> None:
    """White has two moves in prompts of their own, black one."""
    for name in ("white", "black", "white"):
        await policy.role(name).complete(name)


def test_a_workflow_returns_a_reward_for_each_role() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> dict[str, Any]:
        await each_moves(policy)
        return {"white": 1.0, "black": {"legal": 0.25, "won": 0.0}}

    found = rolled_out(solve)
    assert [(one.role, one.reward, one.reward_parts) for one in found] == [
        ("white", 1.0, {"white": 1.0}), ("black", 0.25, {"legal": 0.25, "won": 0.0}), ("white", 1.0, {"white": 1.0}),
    ]  # fmt: skip
    assert found[0].episode == found[2].episode != found[1].episode


def test_a_role_that_does_not_play_needs_no_replies_and_none_is_no_reward() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> dict[str, Any]:
        await policy.role("white").complete("a")
        return {"white": None, "black": 1.0}

    [one] = rolled_out(solve, white={}, black={})
    assert one.reward is None
    assert one.rejected is None


def test_a_rollout_without_a_reward_for_any_role_is_rejected() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> dict[str, Any]:
        await each_moves(policy)
        return {"white": None, "black": None}

    assert [one.rejected for one in rolled_out(solve)] == ["none"] * 3


def test_a_mapping_without_roles_is_the_parts_of_one_reward_for_all() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> dict[str, Any]:
        await each_moves(policy)
        return {"long": 0.5, "polite": 0.25}

    assert [one.reward for one in rolled_out(solve)] == [0.75] * 3


def test_what_a_reward_of_one_role_gave_is_not_anothers() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> Any:
        await policy.role("white").complete("a")
        reply = await policy.role("black").complete("b")
        return await judge(reply)

    assert [one.reward for one in rolled_out(solve)] == [0.5, 0.5]  # a reward of all
    with pytest.raises(WorkflowError, match="none for the role `white`; return a mapping with every role"):
        rolled_out(solve, rewarded="black", white={}, black={})


def test_replies_without_a_role_have_no_reward_of_a_role() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> Any:
        reply = await policy.complete("a")
        return await judge(reply), {"own": 1.0}

    [one] = rolled_out(solve, rewarded="black", black={})
    assert one.reward_parts == {"own": 1.0}


def test_replies_outside_of_the_roles_need_a_reward_unless_they_do_not_learn() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> Any:
        await policy.complete("a", learn=False)
        await policy.role("white").complete("b")
        return {"white": 1.0}

    assert [one.reward for one in rolled_out(solve)] == [None, 1.0]

    async def learned(task: Task, policy: Policy, judge: Any) -> Any:
        await policy.complete("a")
        return await solve(task, policy, judge)

    with pytest.raises(WorkflowError, match="generated outside of its roles"):
        rolled_out(learned)


@pytest.mark.parametrize(("answer", "says"), [
    ({"white": 1.0, "blakc": 0.0}, "`blakc`, which is none; there are `white`, `black`"),
    ({"white": "won", "black": 0.0}, "expected a number"),
    ({"white": 1.0, "black": float("nan")}, "must be a finite number"),
])  # fmt: skip
def test_wrong_rewards_of_roles_are_refused(answer: dict[str, Any], says: str) -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> Any:
        await each_moves(policy)
        return answer

    with pytest.raises(WorkflowError, match=says):
        rolled_out(solve)


def test_a_role_that_the_run_file_does_not_have_is_refused() -> None:
    async def solve(task: Task, policy: Policy, judge: Any) -> Any:
        await each_moves(policy)

    with pytest.raises(WorkflowError, match=r"policy.role\('black'\): the run file's roles are `white`; add it"):
        rolled_out(solve, white={})


SECOND = {"taskset": HELD_OUT}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"rewards": [{"name": "exact", "role": "solvr"}]}, r"rewards\.0\.role: .*`solvr` in .*`solver`"),
    "undeclared": ({"roles": None}, r"rewards\.0\.role: no role `proposer` in .*: there are none"),
    "no roles": ({"workflow": "single_turn", "rewards": REWARDS[:1]}, "all rewards are of roles, and workflow `single"),
    "unused": ({"workflow": "single_turn", "rewards": ["exact"]}, "roles: not honoured by workflow `single_turn`"),
    "operator": (
        {"pipeline": [{"name": "verify", "rewards": [{"name": "exact", "role": "solver"}]}]},
        r"pipeline\.0\.rewards\.0\.role: an operator scores",
    ),
    "evaluation": ({"evaluation": SECOND | {"role": "judge"}}, r"evaluation\.role: no role `judge`"),
    "evaluated": (
        {"evaluation": SECOND | {"workflow": "single_turn"}, "rewards": REWARDS[:3]},
        r"evaluation\.rewards: all rewards are of roles",
    ),
    "evaluation without roles": (
        {"evaluation": SECOND | {"workflow": "single_turn", "role": "solver"}},
        r"evaluation\.role: not honoured by workflow `single_turn`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_an_error_of_the_run_file(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    (tmp_path / "plugin.py").write_text(PLUGIN)
    load_run(tiny_run(tmp_path, **BASE))
    with pytest.raises(ConfigError, match=message):
        load_run(tiny_run(tmp_path, **BASE | changes))


def test_check_prints_the_roles_and_whose_replies_rewards_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    assert main(["check", str(tiny_run(tmp_path, **BASE)), "--no-data"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "roles proposer (learn no), solver" in lines
    assert sum("role proposer" in line for line in lines) == 1
    assert sum("role solver" in line for line in lines) == 2


def test_grade_scores_a_response_by_the_rewards_of_its_role(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN.replace("rank.group = True", "rank.group = False"))
    run = tiny_run(tmp_path, **BASE | {"rewards": [REWARDS[0], REWARDS[1]]})
    (tmp_path / "rows.jsonl").write_text("".join(
        json.dumps({"response": "ab"} | ({"role": role} if role else {})) + "\n" for role in ("proposer", "solver", "")
    ))  # fmt: skip
    arguments = ["grade", "--run", str(run), "--input", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    found = [json.loads(line)["reward"] for line in (tmp_path / "out").read_text().splitlines()]
    assert found == [0.75, 2.0, None]
