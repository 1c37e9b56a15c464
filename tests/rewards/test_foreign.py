"""Reward functions that were written for TRL and verl, unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.reward_helpers import completion

from rollmill.errors import ConfigError, RewardError
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.builtin.python import PythonReward
from rollmill.rewards.foreign_functions import adapt_function
from rollmill.types import Task

OURS = """
import asyncio

def by_columns(prompts, completions, answer, difficulty, **kwargs):
    assert prompts == ["question"] * len(completions)
    assert len(kwargs["completion_ids"]) == len(completions)
    return [float(text == right) / level for text, right, level in zip(completions, answer, difficulty)]

def any_column(completions, **kwargs):
    kwargs["log_extra"]("note", ["x"])
    kwargs["log_metric"]("letters", len(completions[0]))
    return [1.0 if text in (kwargs["solution"][0], kwargs["answer"][0]) else None for text in completions]

def renamed(completions, final, **kwargs):
    return [float(text == right) for text, right in zip(completions, final)]

def chat(completions, **kwargs):
    return [float(len(each[0]["content"])) for each in completions]

async def slow(completions, ground_truth, **kwargs):
    await asyncio.sleep(0.01)
    return [float(text == right) for text, right in zip(completions, ground_truth)]

def longest(prompts, completions, weight=1.0, **kwargs):
    most = max(map(len, completions))
    return [weight * (len(text) == most) for text in completions]
longest.group = True

def too_many(completions, **kwargs):
    return [1.0, 2.0]

def a_number(completions, **kwargs):
    return 1.0

def two_columns(completions, one, two, **kwargs):
    return [0.0] * len(completions)

def shaped(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    right = solution_str == ground_truth
    return {"score": right + extra_info["bonus"], "acc": right, "pred": solution_str}

def short(solution_str, ground_truth, scale=2, **kwargs):
    return scale * (solution_str == ground_truth), "details"

def without_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}

def strict(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "foreign.py"
    path.write_text(OURS)
    return path


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def run_in(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def built(file: Path, name: str, run_in: str = "thread", **options: Any) -> RewardManager:
    config: Any = {"name": "python", "function": f"{file}:{name}", "run_in": run_in, "processes": 1, "options": options}
    return build_reward_manager([PythonReward(**config)])


def scored(rewards: RewardManager, text: str, **of: Any) -> RewardResult:
    fields: dict[str, Any] = {"id": "t1", "prompt": "question", "answer": "7", "metadata": {}} | of
    return asyncio.run(rewards.score(Task(**fields), completion(text)))


def test_functions_of_trl_get_columns_and_log(file: Path, run_in: str) -> None:
    row = {"difficulty": 2}
    rewards = built(file, "by_columns", run_in)
    assert [scored(rewards, text, metadata=row).reward for text in ("7", "8")] == [0.5, 0.0]
    rewards = built(file, "any_column", run_in)
    right, wrong = (scored(rewards, text) for text in ("7", "eight"))
    assert (right.reward, wrong.reward) == (1.0, None)
    assert (right.details, wrong.details) == ({"any_column/letters": 1.0}, {"any_column/letters": 5.0})
    assert scored(built(file, "slow", run_in), "7").reward == 1.0
    messages = [{"role": "user", "content": "q"}]
    assert scored(built(file, "chat", run_in), "four", prompt=messages).reward == 4.0


def test_functions_of_verl_get_their_arguments_and_log(file: Path, run_in: str) -> None:
    row = {"data_source": "sums", "extra_info": {"bonus": 0.5}}
    rewards = built(file, "compute_score", run_in)
    right, wrong = (scored(rewards, text, metadata=row) for text in ("7", "8"))
    assert (right.reward, right.details) == (1.5, {"compute_score/acc": 1.0})
    assert (wrong.reward, wrong.details) == (0.5, {"compute_score/acc": 0.0})
    assert scored(built(file, "short", run_in, scale=3), "7").reward == 3.0


def test_the_answers_column_may_have_any_name(file: Path) -> None:
    assert scored(built(file, "renamed"), "7").reward == 1.0
    assert scored(built(file, "renamed"), "8", metadata={"final": "8"}).reward == 1.0
    assert scored(built(file, "renamed", final=["8"]), "8").reward == 1.0


def test_a_function_for_groups_sees_all_completions(file: Path, run_in: str) -> None:
    rewards = built(file, "longest", run_in, weight=2.0)
    task = Task("t1", "question", "7")
    found = asyncio.run(rewards.score_group(task, [completion("a", 0), completion("bcd", 1)]))
    assert [each.reward for each in found] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_many", "returned 2 values for 1 completions"),
        ("a_number", "a reward function of TRL returns a list"),
        ("two_columns", "needs the column `one`, which the task t1 does not have"),
        ("without_score", "has the key `score`"),
    ],
)
def test_what_goes_wrong_is_said(file: Path, name: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        scored(built(file, name), "7")


def test_what_cannot_be_called_is_refused_before_the_run(file: Path) -> None:
    with pytest.raises(ConfigError, match="needs `trainer_state`, which only TRL has"):
        built(file, "shaped")
    with pytest.raises(ConfigError, match="takes no option `scale`"):
        built(file, "strict", scale=2)


@pytest.mark.slow
def test_functions_of_trls_own_package() -> None:
    """They read conversations, as for its trainers."""
    trl = pytest.importorskip("trl.rewards")
    config = PythonReward(name="python", function="trl.rewards:think_format_reward", run_in="thread")
    rewards = build_reward_manager([config])
    texts = ["<think>\nsum\n</think>\n7", "7"]
    expected = trl.think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    messages = [{"role": "user", "content": "q"}]
    assert [scored(rewards, text, prompt=messages).reward for text in texts] == expected == [1.0, 0.0]


def test_a_group_function_of_rollmill_may_name_its_parameters_freely() -> None:
    def spread(item: Any, completions: Any, **options: Any) -> list[float]:
        return [0.0 for _ in completions]

    spread.group = True  # type: ignore[attr-defined]
    assert adapt_function(spread) is spread
