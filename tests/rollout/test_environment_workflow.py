"""The workflow `environment`: what the policy sees, what is recorded, how an episode ends."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import GRPO, SFT, tiny_run

import rollmill
from rollmill.config.loader import load_run
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rollout.policy import PolicyConversation
from rollmill.types import Experience

LADDER = """
import rollmill
from rollmill.rollout.environments import StepResult

@rollmill.environment
class Ladder:
    def __init__(self, *, length: int = 3, text: str = "0"):
        self.length, self.text, self.at = length, text, 0

    def reset(self, task, seed):
        self.at, self.seed = 0, seed
        return "1" + self.text

    def step(self, action):
        self.at += 1
        if action is None:
            raise ValueError
        return StepResult(f"{self.at + 1}{self.text}", 0.25 * self.at, self.at == self.length, {"height": self.at})
"""


def ladder(folder: Path, code: str = LADDER, length: int = 3, text: str = "0", **workflow: Any) -> Path:
    """The directory of a tiny run whose second stage acts in the ladder, for one step."""
    (folder / "ladder.py").write_text(code)
    acting = {
        "environment": {"name": "Ladder", "length": length, "text": text},
        "workflow": {"name": "environment", **workflow},
    }
    stages = [SFT | {"steps": 1}, GRPO | {"steps": 1} | acting]
    sizes = {"max_new_tokens": 4}
    path = tiny_run(folder, plugins=["ladder.py"], rollout=sizes, rewards=None, evaluation=None, stages=stages)
    rollmill.run(path, out=folder / "run")
    return folder / "run"


def metrics(run: Path) -> dict[str, Any]:
    """Of the last step."""
    found: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return found


def mine(experience: Experience) -> np.ndarray[Any, Any]:
    """Where the policy spoke, as the turns have it."""
    found = np.zeros(len(experience.token_ids), bool)
    for turn in experience.turns:
        found[turn.start : turn.end] = turn.role == "assistant"
    return found


def test_an_episode_is_one_experience_with_everything_that_was_said(tmp_path: Path) -> None:
    run = ladder(tmp_path)
    found = rollmill.load_experiences(run, 2)
    assert len(found) == 16
    for one in found:
        roles = ["prompt", "assistant", "observation", "assistant", "observation", "assistant"]
        assert [turn.role for turn in one.turns] == roles
        assert one.turns[0].text.endswith("\n10")
        assert [turn.text for turn in one.turns[2::2]] == ["20", "30"]
        assert (one.action_mask == mine(one)).all()
        assert one.reward == 1.5
    logged = metrics(run)
    assert (logged["episode/turns"], logged["episode/height"], logged["episode/overflows"]) == (3.0, 3.0, 0.0)
    assert (logged["environment/resets"], logged["environment/steps"], logged["environment/crashes"]) == (16, 48, 0)
    assert logged["reward/environment"] == 1.5


def test_turns_end_an_episode(tmp_path: Path) -> None:
    run = ladder(tmp_path, turns=2)
    assert {one.reward for one in rollmill.load_experiences(run, 2)} == {0.75}


@pytest.mark.parametrize("history", [1, 2])
def test_with_the_last_observations_alone_each_turn_is_a_step(tmp_path: Path, history: int) -> None:
    run = ladder(tmp_path, history=history)
    found = rollmill.load_experiences(run, 2)
    assert len(found) == 48
    for first in range(0, 48, 3):
        steps = found[first : first + 3]
        assert len({one.episode for one in steps}) == 1
        assert [one.step_reward for one in steps] == [0.25, 0.5, 0.75]
        assert [one.anchor for one in steps] == ["10", "20", "30"]
        assert {one.reward for one in steps} == {1.5}
        task = steps[0].prompt.removesuffix("10")
        seen = ["10", "20", "30"]
        for number, one in enumerate(steps):
            window = range(max(0, number + 1 - history), number + 1)
            said = [steps[each].turns[-1] for each in window[:-1]]
            assert one.turns[0].text.startswith(task + seen[window[0]])
            assert one.turns[0].text.endswith(seen[number])
            tokens = [token for each, turn in zip(window, said, strict=False) for token in _own(steps[each], turn)]
            assert _holds(one.token_ids[: one.turns[0].end].tolist(), tokens)
            assert (one.action_mask == mine(one)).all()
    assert metrics(run)["reward/steps"] == 1.5


def _own(experience: Experience, turn: Any) -> list[int]:
    return [int(token) for token in experience.token_ids[turn.start : turn.end]]


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1))


def test_steps_with_full_history_see_everything(tmp_path: Path) -> None:
    found = rollmill.load_experiences(ladder(tmp_path, steps=True), 2)
    assert len(found) == 48
    for before, after in pairwise(found):
        if before.episode == after.episode:
            assert after.token_ids[: len(before.token_ids)].tolist() == before.token_ids.tolist()
            assert not after.action_mask[: len(before.token_ids)].any()


def test_an_episode_that_outgrows_the_context_ends(tmp_path: Path) -> None:
    run = ladder(tmp_path, length=50, text="0123456789", turns=50)
    found = rollmill.load_experiences(run, 2)
    assert len(found) == 16
    assert all(len(one.token_ids) <= 64 for one in found)
    assert all(one.reward > 0 for one in found if one.reward is not None)
    assert metrics(run)["episode/overflows"] == 1.0


def test_the_system_s_text_comes_first(tmp_path: Path) -> None:
    found = rollmill.load_experiences(ladder(tmp_path, system="1+1"), 2)
    assert all(one.prompt.startswith("1+1\n\n") for one in found)


def test_what_an_environment_raises_ends_the_run_with_its_place(tmp_path: Path) -> None:
    said = (
        r"`environment` failed on task .*ladder.py:17: environment `Ladder` failed on task .*: step raised ValueError"
    )
    with pytest.raises(WorkflowError, match=said):
        ladder(tmp_path, code=LADDER.replace("if action is None", "if self.at == 2"))


def test_messages_join_a_chat_and_plain_text(tmp_path: Path) -> None:
    nobody: Any = None
    chat = PolicyConversation(nobody, [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}])
    chat.tell("")
    chat.tell("look")
    chat.tell([{"role": "user", "content": "here"}, {"role": "tool", "content": "1", "tool_call_id": "a"}])
    chat.tell([{"role": "tool", "content": "2", "tool_call_id": "b"}])
    assert [(each["role"], each["content"]) for each in chat.messages] == [
        ("system", "s"),
        ("user", "task\n\nlook\n\nhere"),
        ("tool", "1"),
        ("tool", "2"),
    ]
    picture = [{"type": "image_url", "image_url": {"url": "a.png"}}]
    chat.tell([{"role": "user", "content": picture}, {"role": "user", "content": "a picture"}])
    joined = [*picture, {"type": "text", "text": "\n\n"}, {"type": "text", "text": "a picture"}]
    assert [each["content"] for each in chat.messages[-2:]] == ["2", joined]
    plain = PolicyConversation(nobody, "task ")
    plain.tell([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert plain._text == "task a\nb"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["workflow={name: environment, history: 2, steps: true}"], "workflow.steps: not honoured with history"),
        (
            ["workflow=tools", "tools=[{name: calculator, time_limit_s: 1}]"],
            "tools.0.time_limit_s: not honoured by `calculator`",
        ),
        (
            ["environment={name: textarena, id: X, memory_gb: 2}"],
            "environment.memory_gb: not honoured with processes 0",
        ),
        (["algorithm={name: gigpo}"], r"workflow.steps: advantage `gigpo` compares steps"),
        (["environment=reasoning_gym"], "environment.name: `reasoning_gym` scores only tasks of a generator"),
        (["environment=null"], "environment: workflow `environment` acts in one"),
        (["workflow=single_turn"], "environment: not honoured by workflow `single_turn`"),
    ],
)
def test_keys_that_cannot_work_are_named(tmp_path: Path, settings: list[str], text: str) -> None:
    path = tiny_run(
        tmp_path, stages=None, rewards=None, workflow="environment", environment="gymnasium", evaluation=None
    )
    with pytest.raises(ConfigError, match=text):
        load_run(path, settings)
