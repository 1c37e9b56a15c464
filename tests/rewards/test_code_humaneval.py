"""HumanEval: every canonical solution passes, and what changes its behaviour does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.code_mutants import Mutant, chosen, load_rows, passes_plainly
from support.reward_helpers import completion, task

from rollmill.config.taskset import TasksetConfig
from rollmill.data.taskset import load_taskset
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.builtin.code import CodeReward


async def _graded(judge: RewardManager, pairs: list[tuple[dict[str, str], str]]) -> list[RewardResult]:
    async def one(row: dict[str, str], text: str) -> RewardResult:
        columns = {"prefix": row["prompt"], "test": row["test"], "entry_point": row["entry_point"]}
        return await judge.score(task(None, row["task_id"], **columns), completion(text))

    return list(await asyncio.gather(*(one(*pair) for pair in pairs)))


def graded(pairs: list[tuple[dict[str, str], str]], **keys: object) -> list[RewardResult]:
    with build_reward_manager([CodeReward(name="code", **keys)]) as judge:  # type: ignore[arg-type]
        return asyncio.run(_graded(judge, pairs))


@pytest.mark.slow
def test_all_canonical_solutions_pass(data_dir: Path) -> None:
    rows = load_rows(data_dir)
    found = graded([(row, row["canonical_solution"]) for row in rows])
    assert len(found) == 164
    assert {row["task_id"]: each.outcomes for row, each in zip(rows, found, strict=True) if each.reward != 1.0} == {}


def test_tasks_of_the_preset_carry_their_tests(data_dir: Path) -> None:
    path = data_dir / "humaneval" / "HumanEval.jsonl"
    taskset = load_taskset(TasksetConfig(path=path, preset="humaneval", fields={"id": "task_id"}, limit=3))
    with build_reward_manager([CodeReward(name="code")]) as judge:
        for each in taskset.tasks:
            assert each.response is not None
            right, wrong = (
                asyncio.run(judge.score(each, completion(text))) for text in (each.response, "    return 'wrong'\n")
            )
            assert (each.id[:10], right.reward, wrong.reward) == ("HumanEval/", 1.0, 0.0)


def earning(found: list[Mutant], **keys: object) -> list[str]:
    """What was changed in the mutants that earn something."""
    judgements = graded([(each.row, f"```python\n{each.code}\n```") for each in found], **keys)
    return [each.what for each, judgement in zip(found, judgements, strict=True) if judgement.reward]


def sorted_out(rows: list[dict[str, str]], count: int, seed: int = 3) -> tuple[list[Mutant], list[Mutant]]:
    """Of `count` mutants, those that the published checks notice, and the others."""
    made = chosen(rows, count, seed)
    passes = passes_plainly(made)
    wrong, same = ([each for each, passed in zip(made, passes, strict=True) if passed is of] for of in (False, True))
    return wrong, same


@pytest.mark.slow
def test_mutants_are_rejected_and_those_that_no_check_notices_are_not(data_dir: Path) -> None:
    """The reward says what the published check says in a process without any walls."""
    wrong, same = sorted_out(load_rows(data_dir), 45, seed=5)  # without endless loops, which cost time
    assert len(wrong) >= 35
    assert len(same) >= 3
    assert earning(wrong, time_limit_s=2.0) == []
    assert len(earning(same)) == len(same)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_mutants_are_rejected(data_dir: Path) -> None:
    wrong, same = sorted_out(load_rows(data_dir), 1150)
    assert len(wrong) >= 1000
    accepted = earning(wrong, time_limit_s=1.0)  # endless loops take all of it
    assert len(accepted) <= 0.02 * len(wrong), accepted
    assert len(earning(same)) >= 0.98 * len(same)
