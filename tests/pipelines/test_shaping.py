"""Operators that add to rewards, against the published numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_up import group, process, rewards, rollout

from rollmill.types import Experience


def added(experiences: list[Experience], name: str) -> list[float | None]:
    return [each.reward_parts.get(f"pipeline/{name}") for each in experiences]


@pytest.mark.parametrize(
    ("correct", "expected"), [([1.0, 1.0, 0.0], [0.5, 0.0, -0.5]), ([0.0, 1.0, 0.0], [0.0, 0.0, -0.5])]
)
def test_length_reward_of_kimi(correct: list[float], expected: list[float]) -> None:
    found, report = process("length_reward", group(correct, length=[100, 200, 300]))
    assert added(found, "length_reward") == pytest.approx(expected)
    assert rewards(found) == pytest.approx([one + other for one, other in zip(correct, expected, strict=True)])
    assert report.changed == sum(value != 0 for value in expected)


def test_length_reward_is_0_for_equal_lengths_and_during_the_warm_up() -> None:
    found, report = process("length_reward", group([1.0, 0.0], length=50))
    assert (rewards(found), report.changed) == ([1.0, 0.0], 0)
    warm = {"name": "length_reward", "warmup_steps": 8}
    assert rewards(process(warm, group([1.0, 1.0], length=[10, 20]), version=7)[0]) == [1.0, 1.0]
    assert rewards(process(warm, group([1.0, 1.0], length=[10, 20]), version=8)[0]) == [1.5, 0.5]


def test_length_reward_by_a_part_and_a_weight() -> None:
    experiences = group([1.2, 0.9], parts=[{"math": 0.0}, {"math": 1.0}], length=[10, 20])
    found, _ = process({"name": "length_reward", "part": "math", "weight": 0.2}, experiences)
    assert rewards(found) == [1.2, 0.8]  # the first is wrong and gains nothing by being short


def test_what_was_not_judged_is_neither_compared_nor_rewarded() -> None:
    found, _ = process("length_reward", group([1.0, None, 1.0], length=[10, 500, 20]))
    assert rewards(found) == [1.5, None, 0.5]


@pytest.mark.parametrize(
    ("length", "expected"), [(16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0), (100, 0.0)]
)
def test_overlong_penalty_of_dapo(length: int, expected: float) -> None:
    options = {"name": "overlong_penalty", "longest": 20480, "buffer": 4096}
    found, _ = process(options, [rollout(1.0, length=length)])
    assert added(found, "overlong_penalty") == [expected]
    assert rewards(found) == [1.0 + expected]


def test_overlong_penalty_takes_the_run_s_limit_and_a_fifth_of_it() -> None:
    experiences = group([0.0] * 3, length=[80, 90, 100])
    assert rewards(process("overlong_penalty", experiences, max_new_tokens=100)[0]) == [0.0, -0.5, -1.0]


def test_repetition_penalty_is_the_share_of_repeated_ngrams() -> None:
    experiences = [rollout(1.0, index=0, length=40), rollout(1.0, index=1, text="ab" * 30)]
    found, _ = process({"name": "repetition_penalty", "ngram": 2, "weight": 0.5}, experiences)
    assert found[0].reward == 1.0
    repeated = 1 - 3 / 60  # of the 60 pairs of 60 letters and the end: ab, ba, b-end
    looping = 0.0  # the end of sequence ends the loop
    assert found[1].reward == pytest.approx(1 - 0.5 * max(repeated, looping))


def test_diversity_by_answer_and_by_ngrams() -> None:
    texts = ["so 12", "it is 12", "it is 13", "no idea"]
    options: dict[str, Any] = {"name": "diversity", "by": "answer", "after": "is", "weight": 0.3, "threshold": 0.5}
    found, _ = process(options, group([1.0, 1.0, 1.0, 0.0], text=texts))
    assert added(found, "diversity") == pytest.approx([0.2, 0.3, 0.3, 0.0])  # no answer at all: alike; failures: none
    same, _ = process(
        {"name": "diversity", "weight": 1.0}, group([1.0, 1.0, 1.0], text=["abcdefgh", "abcdefgh", "12345678"])
    )
    assert same[0].reward == same[1].reward == pytest.approx(1.5)
    assert same[2].reward == pytest.approx(2.0)


@pytest.mark.parametrize("after", ["is", None, "</think>"])
def test_diversity_compares_answers_without_reasoning(after: str | None) -> None:
    texts = [
        "<think>it is 1</think>it is 12",
        "it is 2</think>it is 12",
        "<think>it is 12</think>it is 13",
        "<think>it is 12",
    ]
    options = {"name": "diversity", "by": "answer", "after": after, "weight": 0.3, "threshold": 0.5}
    found, _ = process(options, group([1.0, 1.0, 1.0, 0.0], text=texts))
    assert added(found, "diversity") == pytest.approx([0.2, 0.2, 0.3, 0.0])


def test_diversity_of_one_is_0() -> None:
    assert rewards(process("diversity", group([1.0]))[0]) == [1.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"factor": 2.0}, [0.0, 2.0, None]),
        ({"factor": 2.0, "offset": -1.0}, [-1.0, 1.0, None]),
        ({"offset": 1.0, "clip": [0.0, 1.5]}, [1.0, 1.5, None]),
    ],
)
def test_scale(options: dict[str, Any], expected: list[float | None]) -> None:
    found, _ = process({"name": "scale", **options}, group([0.0, 1.0, None]))
    assert rewards(found) == expected


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, None]), min_size=1, max_size=6), st.randoms())
def test_parts_make_up_the_reward_after_all_shaping(values: list[float | None], random: Any) -> None:
    lengths = [random.randint(1, 40) for _ in values]
    before = group(values, length=lengths)
    shapers = [
        "length_reward",
        {"name": "overlong_penalty", "longest": 30, "buffer": 20},
        "repetition_penalty",
        "diversity",
    ]
    found, _ = process([*shapers, {"name": "scale", "factor": 0.5}], before)
    for each, raw in zip(found, values, strict=True):
        if raw is None:
            assert each.reward is None
        else:
            assert each.reward == pytest.approx(sum(value for value in each.reward_parts.values() if value is not None))
            assert each.info.get("raw_reward", each.reward) == raw


def played(rewards: list[float], **each: Any) -> list[Experience]:
    """A group in which two players take turns: white first."""
    found = group(rewards, **each)
    for index, experience in enumerate(found):
        experience.role = ("white", "black")[index % 2]
    return found


def test_length_reward_compares_the_lengths_of_one_role() -> None:
    found, _ = process("length_reward", played([1.0, 1.0, 1.0, 1.0], length=[3, 30, 3, 30]))
    assert rewards(found) == [1.0] * 4


def test_diversity_compares_the_completions_of_one_role() -> None:
    found, _ = process({"name": "diversity", "by": "answer"}, played([1.0] * 4, text=["a", "b", "a", "b"]))
    assert rewards(found) == [1.0] * 4


def test_priority_and_success_rate_do_not_mix_roles() -> None:
    """White always wins, which only the mix makes look like a close match."""
    told: list[Any] = []
    sections = [{"name": "priority", "by": "variance", "floor": 0.001}, "success_rate"]
    found, _ = process(sections, played([1.0, 0.0, 1.0, 0.0]), observe=lambda task, successes: told.append(successes))
    assert {each.info["priority"] for each in found} == {0.001}
    assert told == [[1.0, 1.0]]
    process(sections, played([1.0, 1.0, 1.0, 0.0]), observe=lambda task, successes: told.append(successes))
    assert told[1:] == [[1.0, 0.0]]
