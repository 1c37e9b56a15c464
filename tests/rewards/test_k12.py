"""The K-12 reward: its keys, metrics by subject, wrong task data, the judge; answers are tested in libs/grading."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from support.chat_server import ChatServer, chat_server, shown
from support.reward_helpers import judged

from rollmill.errors import RewardError
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.builtin.k12 import K12Reward
from rollmill_grading.school import unit_words

OPTIONS = {letter: f"text {letter}" for letter in "ABCDE"}


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardManager]:
    with build_reward_manager([K12Reward(name="k12")]) as judge:
        yield judge


def config(**keys: Any) -> K12Reward:
    return K12Reward.model_validate({"name": "k12", **keys})


# -- partial credit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "column", "answer", "text", "reward"),
    [
        ({"ordering": "pairs"}, {"type": "ordering"}, "ABC", "B, A, C", 1 / 3),
        ({"ordering": "pairs"}, {"type": "ordering"}, "ABC", "C, B, A", 0),
        ({"ordering": "pairs"}, {"type": "ordering"}, "ABC", "A, B", 0),
        ({"blanks": "all"}, {"type": "blank"}, ["5", "10"], "5；11", 0),
        ({"blanks": "all"}, {"type": "blank"}, ["5", "10"], "5；10", 1),
        ({"matching": "all"}, {"type": "matching"}, {"1": "A", "2": "B"}, "1-A", 0),
        ({"matching": "all"}, {"type": "matching"}, {"1": "A", "2": "B"}, "2-B, 1-A", 1),
        ({"tolerance": 0.1}, {"type": "numeric"}, "10", "11", 1),
        ({"tolerance": 0.1}, {"type": "numeric", "tolerance": 0}, "10", "11", 0),
        ({"units": "required"}, {"type": "numeric", "unit": "km"}, "10", "10", 0),
        ({"units": "required"}, {"type": "numeric", "unit": "km"}, "10", "10 km", 1),
        ({"units": "required"}, {"type": "numeric", "unit": "km"}, "10", "10000米", 1),
        ({"units": "required"}, {"type": "numeric"}, "10 km", "10", 0),
        ({"longest_short_answer": 20}, {"type": "short", "keywords": ["sun"]}, None, "sun " * 10, 0),
    ],
)
def test_keys_change_the_rules(
    keys: dict[str, Any], column: dict[str, Any], answer: Any, text: str, reward: float
) -> None:
    with build_reward_manager([config(**keys)]) as judge:
        assert judged(judge, answer, text, k12=column).reward == pytest.approx(reward)


def test_a_key_without_effect_is_refused() -> None:
    with pytest.raises(ValidationError, match="subset_credit is honoured only with multiple: subset"):
        config(multiple="all", subset_credit=0.4)


# -- tasks -----------------------------------------------------------------------------------------------------


def test_options_subject_and_grade_may_be_columns_of_their_own(judge: RewardManager) -> None:
    found = judged(judge, "B", "Answer: text B", choices=list(OPTIONS.values()), subject="physics", grade=8)
    assert (found.reward, found.details) == (1, {"k12/physics": 1, "k12/grade-8": 1})


def test_a_task_without_an_answer_is_not_judged(judge: RewardManager) -> None:
    found = judged(judge, None, "B", k12={"subject": "physics"})
    assert (found.reward, found.outcomes, found.details) == (None, {"k12": "not_applicable"}, {})


@pytest.mark.parametrize(
    ("answer", "column", "message"),
    [
        ("B", "single", "its column `k12` is 'single'; it has to be a mapping"),
        ("B", {"type": "choice"}, "its `k12.type` is wrong: Input should be 'single'"),
        ("B", {"kind": "single"}, "its `k12.kind` is wrong: Extra inputs are not permitted"),
        ("E", {"type": "single", "options": ["x", "y"]}, "its answer 'E' names no option; the options are A, B"),
        ("A or B", {"type": "multiple", "options": ["x", "y"]}, "names no option"),
        ("AB", {"type": "single", "options": ["x", "y"]}, "has 2 letters; `k12.type` should be multiple"),
        ("maybe", {"type": "true_false"}, "is neither true nor false"),
        ([], {"type": "blank"}, "its answer is an empty list"),
        ([["x"]], {"type": "blank"}, "a blank needs text or a number"),
        (["1", "2"], {"type": "blank", "points": [1]}, "`k12.points` is .*; give 2 numbers"),
        (["1", "2"], {"type": "blank", "synonyms": [["a"]]}, "has 1 lists for 2 blanks"),
        (["1", "2"], {"type": "blank", "points": [1, 2], "unordered": True}, "cannot go with `k12.unordered`"),
        ("5 kg", {"type": "numeric", "unit": "km"}, "its answer is '5 kg', but `k12.unit` is km"),
        ("A", {"type": "ordering"}, "is not an order; give at least two different labels"),
        ("AA", {"type": "ordering"}, "is not an order"),
        ("none", {"type": "matching"}, "has no pairs; give a mapping"),
        ("x", {"type": "short", "rubric": "Two reasons."}, "give the reward the key `judge`, list its key points"),
        (None, {"type": "short"}, "give it `k12.rubric`, `k12.keywords` or a reference"),
    ],
)
def test_wrong_task_data_is_an_error_that_says_what_to_do(
    judge: RewardManager, answer: Any, column: Any, message: str
) -> None:
    with pytest.raises(RewardError, match=rf"reward `k12` failed on task `t1`: .*{message}"):
        judged(judge, answer, "some answer", k12=column)


def test_without_pint_the_error_names_the_extra(judge: RewardManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pint", None)
    unit_words._registry.cache_clear()
    unit_words._pint.cache_clear()
    column = {"type": "numeric", "unit": "km"}
    assert judged(judge, "5", "5 km", k12=column).reward == 1
    assert judged(judge, "5", "5分", k12={"type": "numeric", "unit": "分"}).reward == 1
    with pytest.raises(RewardError, match=r"comparing units needs pint: pip install 'rollmill\[k12\]'"):
        judged(judge, "5", "5000 m", k12=column)


# -- short answers ---------------------------------------------------------------------------------------------


def with_judge(server: ChatServer, answer: Any, text: str, column: dict[str, Any]) -> RewardResult:
    reward = config(judge={"endpoint": server.url, "model": "m", "scale": (0, 4)})
    with build_reward_manager([reward]) as judge:
        found = judged(judge, answer, text, k12=column)
        assert judge.counters()["k12/calls"] == len(server.requests)
    return found


def test_a_model_scores_by_the_rubric_and_sees_the_answer_alone() -> None:
    column = {"type": "short", "rubric": "Names heat and light.", "subject": "physics"}
    with chat_server(['One of two. {"score": 2}']) as server:
        found = with_judge(server, None, "<think>light</think>Let me see.\nAnswer: heat.", column)
        [request] = server.requests
    assert (found.reward, found.details) == (0.5, {"k12/physics": 0.5})
    assert "Names heat and light." in shown(request)
    assert "heat." in shown(request)
    assert "Let me see" not in shown(request)


def test_without_a_rubric_the_model_reads_the_reference() -> None:
    with chat_server(['{"score": 4}']) as server:
        assert with_judge(server, "It gives heat.", "Warmth.", {"type": "short"}).reward == 1
        assert "The reference answer is: It gives heat." in shown(server.requests[0])


def test_an_empty_answer_is_not_shown_to_the_model() -> None:
    with chat_server(['{"score": 4}']) as server:
        found = with_judge(server, "heat", "Answer: ", {"type": "short"})
        assert (found.reward, found.outcomes["k12"], server.requests) == (0, "no_answer", [])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight": 2}, "weight belongs to the k12 reward; put it beside `judge`"),
        ({"unparsable_reward": -1}, "unparsable_reward has to be from 0 to 1"),
    ],
)
def test_a_judge_of_short_answers_is_a_part_of_the_reward(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(judge={"endpoint": "http://localhost:1/v1", "model": "m", **keys})


@pytest.mark.parametrize(
    ("answer", "column", "message"),
    [
        ("B", {"type": "single", "points": [2]}, "`k12.points` does nothing for the type single"),
        ("5", {"type": "numeric", "rubric": "be kind"}, "`k12.rubric` does nothing for the type numeric"),
        (True, {"tolerance": 0.1}, "`k12.tolerance` does nothing for the type true_false"),
        ("x", {"type": "short", "rubric": "r", "wrong": ["y"]}, "`k12.wrong` does nothing without `k12.keywords`"),
        (["5", " "], {"type": "blank"}, "its answer has an empty blank"),
    ],
)
def test_a_key_that_would_do_nothing_and_an_empty_reference_are_errors(
    judge: RewardManager, answer: Any, column: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        judged(judge, answer, "5", k12=column)


def test_keys_without_a_value_may_stand_in_any_column(judge: RewardManager) -> None:
    empty = {"points": [], "rubric": None, "synonyms": [], "unordered": False, "absolute_tolerance": 0}
    assert judged(judge, "B", "B", k12={"type": "single", **empty}).reward == 1


def test_an_empty_subject_has_no_metric(judge: RewardManager) -> None:
    assert judged(judge, "B", "B", k12={"type": "single", "subject": " ", "grade": 3}).details == {"k12/grade-3": 1.0}
