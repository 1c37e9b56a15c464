"""Several models in one workflow, tools in users' workflows, and distillation through workflows: real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_server import chat_server
from support.tiny import GRPO, HELD_OUT, SFT, outcome, tiny_run

import rollmill
from rollmill.errors import ConfigError, RewardError, WorkflowError
from rollmill.launch import resume
from rollmill.types import Experience

INITIAL = {"policy": "initial"}
GAME = """
import rollmill

@rollmill.workflow
async def game(task, policy, opponent):
    mine = await policy.complete(task.prompt, max_new_tokens=5)
    theirs = await opponent.complete(task.prompt, max_new_tokens=5)
    return {"longer": float(len(mine.text) > len(theirs.text)), "theirs": 0.001 * len(theirs.text)}
"""
REMATCH = """

@rollmill.workflow
async def rematch(task, policy, opponent):
    await policy.complete(task.prompt, max_new_tokens=1)
    theirs = await opponent.complete(task.prompt, max_new_tokens=9)
    return sum(map(ord, theirs.text)) / 1000
"""
BOTH_SIDES = """
import rollmill

@rollmill.workflow
async def both_sides(task, policy):
    one = await policy.complete(task.prompt + "A", max_new_tokens=5)
    other = await policy.complete(task.prompt + "B", max_new_tokens=5)
    won = 1.0 if len(one.text) > len(other.text) else -1.0
    policy.reward(one, won)
    policy.reward(other, -won)
"""
ASKS = """
import rollmill

@rollmill.tool
def double(x: int, *, plus: int = 0) -> int:
    "Twice a number."
    return 2 * x + plus

@rollmill.workflow
async def asks(task, policy, tools, helper):
    said = await policy.complete(task.prompt, max_new_tokens=5)
    found = await tools.call("double", {"x": 4})
    await tools.call("double", {"x": "many"})
    advice = await helper.chat([{"role": "user", "content": found.content}], max_new_tokens=7)
    return {"tool": float(found.content == "11"), "advice": float(advice.text == "well done")}
"""


BY_DIGIT = """
import rollmill

@rollmill.workflow
async def by_digit(task, policy):
    so_far = ""
    for digit in str(task.answer):
        reply = await policy.complete(f"{task.prompt}{so_far}", max_new_tokens=1)
        policy.step(float(reply.text == digit), anchor=f"{task.id} {so_far}")
        so_far += digit
    return 0.0
"""


def run_with(folder: Path, code: str, *overrides: str, **changes: Any) -> list[Experience]:
    """A tiny run of one step of SFT and one of GRPO by the workflow in `code`; the experiences of the last step."""
    (folder / "flow.py").write_text(code)
    changes = {"plugins": ["flow.py"], "rewards": None, "evaluation": None} | changes
    path = tiny_run(folder, **changes)
    rollmill.run(path, ["stages.0.steps=1", "stages.1.steps=1", *overrides], folder / "run")
    return rollmill.load_experiences(folder / "run", 2)


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])


def test_a_frozen_opponent_is_not_recorded(tmp_path: Path) -> None:
    found = run_with(tmp_path, GAME, "stages.1.workflow=game", models={"opponent": {"policy": "initial"}})
    assert len(found) == 16
    for one in found:
        assert [turn.role for turn in one.turns] == ["prompt", "assistant"]
        assert one.action_mask.sum() == one.turns[1].end - one.turns[1].start
        assert set(one.reward_parts) == {"longer", "theirs"}


def test_a_resumed_run_has_the_same_opponent(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(GAME)
    shared: dict[str, Any] = {"plugins": ["flow.py"], "rewards": None, "evaluation": None}
    path = tiny_run(tmp_path, **shared, checkpoint={"every": 1, "keep_last": 9}, models={"opponent": INITIAL})
    options = ["stages.0.steps=1", "stages.1.workflow=game", "stages.1.trainer.lr=0.05", "stages.1.steps=4"]
    rollmill.run(path, options, tmp_path / "run")
    before = outcome(tmp_path / "run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:06d}")
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run")["weights"] == before["weights"]
    assert outcome(tmp_path / "run")["rollouts"] == before["rollouts"]


def test_held_out_tasks_meet_the_same_opponent_after_resuming(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(GAME + REMATCH)
    evaluation = {"every": 1, "sets": {"rematch": {"taskset": HELD_OUT, "workflow": "rematch"}}}
    stage = GRPO | {"workflow": "game", "evaluation": evaluation, "trainer": {"lr": 0.05}, "steps": 3}
    stages = [SFT | {"steps": 1, "evaluation": None}, stage]
    shared: dict[str, Any] = {"plugins": ["flow.py"], "rewards": None, "evaluation": None, "stages": stages}
    path = tiny_run(tmp_path, **shared, checkpoint={"every": 1, "keep_last": 9}, models={"opponent": INITIAL})
    rollmill.run(path, [], tmp_path / "run")
    before = outcome(tmp_path / "run")
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:06d}")
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run")["state"] == before["state"]


def test_a_checkpoint_may_be_the_opponent(tmp_path: Path) -> None:
    run_with(tmp_path, GAME, "stages.1.workflow=game", models={"opponent": {"policy": "initial"}})
    (tmp_path / "second").mkdir()
    opponent = {"path": str(tmp_path / "run/checkpoints/step-000002"), "temperature": 0}
    found = run_with(tmp_path / "second", GAME, "stages.1.workflow=game", models={"opponent": opponent})
    by_task: dict[str, set[float]] = {}
    for one in found:
        by_task.setdefault(one.task_id, set()).add(one.reward_parts["theirs"] or 0.0)
    assert all(len(lengths) == 1 for lengths in by_task.values())  # greedy: the same each time


def test_both_sides_of_a_game_learn_from_rewards_of_their_own(tmp_path: Path) -> None:
    found = run_with(tmp_path, BOTH_SIDES, "stages.1.workflow=both_sides")
    assert len(found) == 32
    assert {one.reward for one in found} == {1.0, -1.0}
    assert sum(one.reward or 0.0 for one in found) == 0
    sides = {one.prompt[-1]: one for one in found}
    assert set(sides) == {"A", "B"}
    assert len({one.episode for one in found}) == 32
    assert np.isfinite(metrics(tmp_path)["loss"])


@pytest.mark.slow
def test_endpoints_are_asked_and_tools_are_given_to_users_workflows(tmp_path: Path) -> None:
    with chat_server(lambda body: "well done") as server:
        found = run_with(
            tmp_path,
            ASKS,
            "stages.1.workflow=asks",
            models={"helper": {"endpoint": server.url, "model": "m"}},
            tools=[{"name": "double", "plus": 3}],
        )
        assert {one.reward for one in found} == {2.0}
        body = server.requests[0]
    assert body["messages"] == [{"role": "user", "content": "11"}]
    assert body["max_tokens"] == 7
    assert len({request["seed"] for request in server.requests}) == 16
    last = metrics(tmp_path)
    assert (last["tools/double/calls"], last["tools/double/errors"]) == (32, 16)
    assert last["tools/double/seconds"] > 0


@pytest.mark.slow
def test_an_endpoint_draws_anew_for_every_question_and_its_errors_name_the_model(tmp_path: Path) -> None:
    twice = ASKS.replace(
        "    return {", "    await helper.chat([{'role': 'user', 'content': found.content}])\n    return {"
    )
    options: dict[str, Any] = {"tools": [{"name": "double", "plus": 3}]}
    with chat_server(lambda body: "well done") as server:
        helper = {"helper": {"endpoint": server.url, "model": "m"}}
        run_with(tmp_path, twice, "stages.1.workflow=asks", models=helper, **options)
        assert len({request["seed"] for request in server.requests}) == 32
    (tmp_path / "gone").mkdir()
    helper = {"helper": {"endpoint": server.url, "model": "m", "tries": 1}}
    with pytest.raises(RewardError, match=r"^models.helper: the model m at http://.*gave up after 1 tries"):
        run_with(tmp_path / "gone", ASKS, "stages.1.workflow=asks", models=helper, **options)


@pytest.mark.parametrize(
    ("code", "changes", "message"),
    [
        (GAME, {}, "asks for `opponent`, which the run does not have"),
        (GAME, {"models": {"task": {"policy": "initial"}}}, "models.task: a workflow takes it as a parameter"),
        (
            GAME,
            {"models": {"opponent": {"policy": "initial"}, "other": {"policy": "initial"}}},
            "models.other: not hon",
        ),
        (GAME, {"models": {"opponent": {}}}, "give exactly one of path, policy and endpoint"),
        (GAME, {"models": {"opponent": {"policy": "initial", "tries": 3}}}, "tries is honoured with endpoint"),
        (GAME, {"models": {"opponent": {"endpoint": "http://x/v1"}}}, "an endpoint needs the name of a model"),
        (GAME, {"models": {"opponent": {"policy": "initial"}}, "tools": ["calculator"]}, "tools: not honoured"),
    ],
)
def test_sections_that_the_workflow_does_not_need(
    tmp_path: Path, code: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_with(tmp_path, code, "stages.1.workflow=game", **changes)


@pytest.mark.parametrize(
    ("workflow", "changes", "message"),
    [
        ("tools", {}, r"tools: workflow `tools` calls tools; add some"),
        ("tools", {"tools": ["calculator", "calculator"]}, "two tools are called `calculator`"),
        ("tools", {"tools": ["calculater"]}, "calculater"),
        ("judged", {"rewards": None, "evaluation": None}, "no model `scorer`"),
        ("{name: vote}", {"evaluation": None}, "rewards: not honoured"),
        ("{name: vote, after: x, pattern: y}", {"rewards": None}, "pattern and after both say"),
        ("{name: reflection, check: x}", {}, "check: not honoured with critic `rewards`"),
        ("{name: reflection, critic: self, threshold: 2}", {}, "threshold: not honoured with critic `self`"),
        ("{name: few_shot, choose: first, seed: 2}", {}, "seed: not honoured with choose `first`"),
        ("{name: few_shot, count: 2, examples: [{prompt: a, response: b}]}", {}, "examples has 1"),
    ],
)
def test_keys_of_workflows_that_nothing_honours(
    tmp_path: Path, workflow: str, changes: dict[str, Any], message: str
) -> None:
    path = tiny_run(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        rollmill.run(path, [f"stages.1.workflow={workflow}"], tmp_path / "run")


def test_examples_of_the_taskset_are_shown(tmp_path: Path) -> None:
    path = tiny_run(tmp_path, model={"new": {"context": 256}}, evaluation=None)
    overrides = ["stages.0.steps=1", "stages.1.steps=1", "stages.1.workflow={name: few_shot, count: 2}"]
    rollmill.run(path, overrides, tmp_path / "run")
    found = rollmill.load_experiences(tmp_path / "run", 2)
    assert all(one.prompt.count("+") > 4 for one in found)  # two worked examples, digit by digit
    for task in {one.task_id for one in found}:
        assert len({one.prompt for one in found if one.task_id == task}) == 1


def test_steps_are_experiences_with_rewards_and_states_of_their_own(tmp_path: Path) -> None:
    found = run_with(tmp_path, BY_DIGIT, "stages.1.workflow=by_digit", "stages.1.algorithm.name=gigpo")
    episodes: dict[str, list[Experience]] = {}
    for one in found:
        episodes.setdefault(one.episode, []).append(one)
    assert len(episodes) == 16
    for steps in episodes.values():
        assert len({step.anchor for step in steps}) == len(steps) > 1
        assert {step.reward for step in steps} == {sum(step.step_reward for step in steps)}


def test_what_is_added_to_a_judgement_has_to_be_numbers(tmp_path: Path) -> None:
    code = """
import rollmill

@rollmill.workflow
async def game(task, policy, judge):
    return await judge(await policy.complete(task.prompt, max_new_tokens=3)), EXTRA
"""
    rewards = [{"name": "exact"}]
    given = code.replace("EXTRA", '{"bonus": 0.25}')
    found = run_with(tmp_path, given, "stages.1.workflow=game", rewards=rewards)
    assert {one.reward for one in found} == {0.25}
    assert found[0].reward_parts == {"exact": 0.0, "bonus": 0.25}
    (tmp_path / "wrong").mkdir()
    with pytest.raises(WorkflowError, match="has to be a mapping of numbers"):
        run_with(tmp_path / "wrong", code.replace("EXTRA", "0.5"), "stages.1.workflow=game", rewards=rewards)
