"""Demonstrations, pairs and reflections: the tokens are the recorded ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.made_up import PROMPT, TASKS, context, group, ids, pipeline, process, rollout, tokenizer

from rollmill.types import Experience, ExperienceSource, StopReason, Task


def new(experiences: list[Experience]) -> list[Experience]:
    return [each for each in experiences if each.source is not ExperienceSource.ROLLOUT]


def origins(experiences: list[Experience]) -> list[str]:
    return [each.info["origin"] for each in experiences]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2]),  # the best
        ({"choose": "shortest"}, [1]),
        ({"choose": "first"}, [0]),
        ({"choose": "best", "count": 2}, [2, 1]),
        ({"choose": "shortest", "count": None}, [1, 2, 0]),
        ({"threshold": 1.2}, [2]),
        ({"threshold": 3.0}, []),
    ],
)
def test_demonstrations_of_successes(options: dict[str, Any], expected: list[int]) -> None:
    experiences = group(
        [1.0, 1.0, 1.5, 0.0, 2.0], length=[9, 5, 7, 3, 4], stop=[StopReason.EOS] * 4 + [StopReason.LENGTH]
    )
    found, report = process({"name": "demonstrations", **options}, experiences)
    assert origins(new(found)) == [f"g0/{index}" for index in expected]
    assert (report.kept, report.added) == (5, len(expected))


def test_a_demonstration_has_the_recorded_tokens_and_a_name_of_its_own() -> None:
    [usual, made], _ = process("demonstrations", [rollout(1.0)])
    assert (made.source, made.id, made.group) == (ExperienceSource.EXPERT, "g0/0/demonstrations", "g0/0/demonstrations")
    assert np.array_equal(made.token_ids, usual.token_ids)
    assert np.array_equal(made.action_mask, usual.action_mask)
    assert not made.logprobs.any()
    assert (made.versions == -1).all()
    assert made.reward is None
    assert made.info == {"origin": "g0/0", "origin_reward": 1.0, "origin_version": 3}
    made.token_ids[0] += 1
    assert not np.array_equal(made.token_ids, usual.token_ids)  # they share no memory


def test_two_operators_of_one_kind_give_different_names() -> None:
    found, _ = process(["demonstrations", {"name": "demonstrations", "choose": "shortest"}, "pairs"], group([1.0, 0.0]))
    assert len(set(ids(found))) == len(found) == 6


def test_per_task_is_a_budget_of_the_whole_run() -> None:
    options = {"name": "demonstrations", "count": None, "per_task": 3}
    made = pipeline(options)

    def count(name: str, task: str, made: Any = made) -> int:
        experiences = group([1.0, 1.0], name=name, task=task)
        return len(new(asyncio.run(made.process(experiences, context()))))

    assert [count("a", "t0"), count("b", "t0")] == [2, 1]
    again = pipeline(options)
    again.load_state_dict(made.state_dict())
    assert [count("c", "t0", again), count("d", "t1", again)] == [0, 2]


def test_pairs_of_best_and_worst() -> None:
    found, report = process({"name": "pairs", "count": 5}, group([0.5, 1.0, 0.0, 0.5, None]))
    pair = new(found)
    assert origins(pair) == ["g0/1", "g0/2"]  # the second best and second worst are equal
    assert [each.reward for each in pair] == [1.0, 0.0]
    assert {each.group for each in pair} == {"g0/pairs/0"}
    assert ids(pair) == ["g0/pairs/0/chosen", "g0/pairs/0/rejected"]
    assert all(each.source is ExperienceSource.PREFERENCE and not each.logprobs.any() for each in pair)
    assert report.added == 2
    assert new(process({"name": "pairs", "margin": 1.0}, group([1.0, 0.0]))[0]) == []
    assert new(process("pairs", group([1.0, 1.0]))[0]) == []


def test_a_completion_that_was_cut_off_is_never_preferred() -> None:
    stop = [StopReason.LENGTH, StopReason.EOS]
    assert new(process("pairs", group([1.0, 0.0], stop=stop))[0]) == []
    assert len(new(process("pairs", group([0.0, 1.0], stop=stop))[0])) == 2
    assert new(process(["truncated", "pairs"], group([0.0, 1.0], stop=stop))[0]) == []  # it has no tokens to compare


def test_pairs_by_length_are_kimi_s() -> None:
    values = [1.0, 1.0, 1.0, 0.0, 0.0, None]
    experiences = group(values, length=[20, 30, 29, 21, 20, 90])
    found, _ = process({"name": "pairs", "by": "length", "count": 9}, experiences)
    made = new(found)
    assert {each.info["origin"] for each in made[::2]} == {"g0/0"}
    assert origins(made[1::2]) == ["g0/1", "g0/3"]  # 1.5 times as long, and longer and wrong; not 29, 20 and unjudged


def test_a_reflection_is_attempt_cue_and_solution() -> None:
    experiences = group([0.0, 1.0, 1.0], text=["it is 13", "it is surely 12", "it is 12"])
    found, _ = process({"name": "reflection", "cue": "\nno: "}, experiences)
    [made] = new(found)
    attempt, solution = experiences[0], experiences[2]
    prompt = int(np.flatnonzero(attempt.action_mask)[0])
    cue = tokenizer().encode("\nno: ")
    expected = [*attempt.token_ids[:-1], *cue, *solution.token_ids[prompt:]]
    assert made.token_ids.tolist() == [int(each) for each in expected]
    assert made.token_ids[-1] == tokenizer().eos_token_id
    assert tokenizer().decode(made.token_ids[made.action_mask]) == "\nno: it is 12" + tokenizer().eos_token
    assert made.response == "it is 13\nno: it is 12"
    assert [made.token_ids[turn.start : turn.end].tolist() for turn in made.turns][2] == cue
    assert made.info == {"origin": "g0/0", "origin_reward": 0.0, "solution": "g0/2"}
    assert (made.source, made.id) == (ExperienceSource.EXPERT, "g0/0/reflection")
    bare, _ = process({"name": "reflection", "cue": "\nno: ", "imitate_cue": False}, group([0.0, 1.0]))
    assert tokenizer().decode(new(bare)[0].token_ids[new(bare)[0].action_mask]) == "it is 12" + tokenizer().eos_token


def test_a_reflection_without_a_sibling_takes_the_task_s_solution() -> None:
    found, _ = process("reflection", group([0.0, 0.0], text="it is 13"))
    [made] = new(found)
    assert made.info["solution"] == "task"
    assert made.response.endswith("it is 12")
    assert new(process({"name": "reflection", "solution": "group"}, group([0.0, 0.0]))[0]) == []
    unsolved = {name: replace(task, response=None) for name, task in TASKS.items()}
    assert new(process("reflection", group([0.0]), task=unsolved.__getitem__)[0]) == []
    assert new(process("reflection", group([1.0, 1.0]))[0]) == []


def test_a_reflection_without_any_solution_says_so() -> None:
    for options in ({"solution": "group"}, {"solution": "task"}):
        task = Task("t0", PROMPT)
        found, report = process({"name": "reflection", **options}, group([0.0, 0.0]), task=lambda _, task=task: task)
        assert (len(found), report.changes) == (2, {"no solution": 1})


def test_a_reflection_that_the_policy_could_not_write_is_left_out() -> None:
    found, report = process("reflection", group([0.0, 1.0]), max_new_tokens=30)
    assert (new(found), report.changes) == ([], {"too long": 1})


def test_a_pair_has_one_role() -> None:
    played = group([1.0, 0.0, 0.75, 0.5])
    for experience, role in zip(played, ["white", "black", "white", "black"], strict=True):
        experience.role = role
    found, _ = process({"name": "pairs", "count": 4}, played)
    assert origins(new(found)) == ["g0/0", "g0/2", "g0/3", "g0/1"]
