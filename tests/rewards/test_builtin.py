"""What holds for every built-in reward: a section of a run file stays a plain value while a copy of it scores."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

from rollmill.config.rewards import Reward, built_in_rewards
from rollmill.config.run import StageConfig
from rollmill.config.section import section_tag
from rollmill.rewards import build_reward_manager
from rollmill.rewards.resources import RewardResources

JUDGE = {"endpoint": "http://localhost:1/v1", "model": "m"}
NEEDED: dict[str, dict[str, Any]] = {
    "format": {"pattern": "x"},
    "judge": JUDGE,
    "length": {"kind": "target"},
    "model": {"path": "somewhere"},
    "pairwise": JUDGE,
    "python": {"function": f"{__file__}:three"},
    "ranking": JUDGE,
}
"""Keys without a default, and those that a reward cannot do without."""
BUILT_IN = [section_tag(each) for each in built_in_rewards()]


def three(task: Any, completion: Any) -> float:
    return 3.0


def section(name: str) -> Reward:
    [found] = StageConfig.model_validate({"rewards": [{"name": name, **NEEDED.get(name, {})}]}).rewards
    return found


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {"model"}))  # which would load one
def test_what_scores_is_a_copy_and_the_section_stays_a_value(name: str) -> None:
    reward, untouched = section(name), section(name)
    with build_reward_manager([reward]) as manager:
        (prepared,) = manager._rewards.values()
        assert prepared is not reward
        assert reward == untouched
        assert not reward.__pydantic_private__
        assert prepared.model_dump() == reward.model_dump()
    assert pickle.loads(pickle.dumps(reward)) == copy.deepcopy(reward) == untouched


def test_a_copy_keeps_what_it_works_with_to_itself() -> None:
    """Two managers of one section share nothing but its values."""
    section = StageConfig.model_validate({"rewards": ["math"]}).rewards[0]
    one, other = (section.prepare(RewardResources()) for _ in range(2))
    assert one._grader is not other._grader  # type: ignore[attr-defined]


def test_a_process_that_gets_a_pickled_reward_knows_all_of_them() -> None:
    """The module of one reward is then the first that is imported."""
    program = (
        "import pickle, sys\n"
        "rewards = pickle.load(sys.stdin.buffer)\n"
        "from rollmill.config.run import StageConfig\n"
        "assert StageConfig.model_validate({'rewards': [each.model_dump() for each in rewards]}).rewards == rewards\n"
        "print(len(rewards))"
    )
    rewards = [section(name) for name in BUILT_IN]
    for first in ("python", "k12", "boxes"):
        rewards.sort(key=lambda each: each.name != first)
        done = subprocess.run(
            [sys.executable, "-c", program], input=pickle.dumps(rewards), stdout=subprocess.PIPE, check=True
        )
        assert int(done.stdout) == len(BUILT_IN)
