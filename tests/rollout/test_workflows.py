"""Users' workflows in a run: what is recorded, what they return, what they may do wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import tiny_run

import rollmill
from rollmill.errors import ConfigError, WorkflowError
from rollmill.trackers import read_metrics

TWO_TURNS = """
import rollmill

@rollmill.workflow
async def two_turns(task, policy, judge, *, bonus: float = 0.5):
    first = await policy.complete(task.prompt, max_new_tokens=6)
    second = await policy.complete([*first.token_ids, *policy.encode("0")], max_new_tokens=6)
    judgement = await judge(second)
    return {"right": judgement.reward, "bonus": bonus}
"""


def run_with(folder: Path, code: str, **changes: Any) -> list[rollmill.types.Experience]:
    """A tiny run whose second stage rolls out by the workflow in `code`; the experiences of its last step."""
    (folder / "flow.py").write_text(code)
    path = tiny_run(folder, plugins=["flow.py"], **changes)
    overrides = ["stages.0.steps=1", "stages.1.steps=1", "evaluation.samples=0"]
    rollmill.run(path, [*overrides, f"stages.1.workflow={changes.get('flow', 'two_turns')}"], folder / "run")
    return rollmill.load_experiences(folder / "run", 2)


def test_a_workflow_of_two_turns_is_one_experience_with_the_policy_s_tokens_alone_in_the_loss(tmp_path: Path) -> None:
    experiences = run_with(tmp_path, TWO_TURNS)
    assert len(experiences) == 16
    for one in experiences:
        assert [turn.role for turn in one.turns] == ["prompt", "assistant", "observation", "assistant"]
        mine = np.zeros(len(one.token_ids), bool)
        for turn in one.turns:
            mine[turn.start : turn.end] = turn.role == "assistant"
        assert (one.action_mask == mine).all()
        assert (one.versions[mine] == 1).all()
        assert (one.versions[~mine] == -1).all()
        assert (one.logprobs[~mine] == 0).all()
        assert one.reward_parts["bonus"] == 0.5
        assert one.reward == pytest.approx(one.reward_parts["right"] + 0.5)
    assert (
        0.2 < read_metrics(tmp_path / "run")[-1]["rollout/prefix_cache/share"] < 0.8
    )  # all second turns go on from it


def test_what_a_workflow_raises_names_the_task_the_file_and_the_line(tmp_path: Path) -> None:
    code = TWO_TURNS.replace("first = await", "1 / 0\n    first = await")
    with pytest.raises(WorkflowError, match=r"(?s)`two_turns` failed on task .*flow.py:6: ZeroDivisionError"):
        run_with(tmp_path, code)


def test_what_is_no_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="expected a number, a mapping of numbers or None"):
        run_with(tmp_path, TWO_TURNS.replace('return {"right": judgement.reward, "bonus": bonus}', 'return "good"'))


def test_a_part_that_the_run_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asks for `opponent`, which the run does not have"):
        run_with(tmp_path, TWO_TURNS.replace("judge, *", "judge, opponent, *"))


def test_a_plain_function_is_no_workflow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"flow.py:4: two_turns: .* write `async def`"):
        run_with(tmp_path, TWO_TURNS.replace("async def", "def").replace("await ", ""))
