"""The K-12 reward: rules of partial credit, what may not happen, metrics by subject, wrong task data, the judge."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest
from chat_server import ChatServer, chat_server, shown
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from reward_helpers import judged, task

from rollmill.config.rewards.k12 import K12Reward
from rollmill.errors import RewardError
from rollmill.rewards import RewardManager, RewardResult, build_reward_manager
from rollmill.rewards.answers.extraction import extract_answer
from rollmill.rewards.k12 import unit_words
from rollmill.rewards.k12.answer_types import kendall_tau
from rollmill.rewards.k12.comparison import parse_amount
from rollmill.rewards.k12.question import read_question
from rollmill.rewards.k12.reward import multiple_choice_credit
from rollmill.rewards.k12.unit_words import convert_unit, parse_units

OPTIONS = {letter: f"text {letter}" for letter in "ABCDE"}
MULTIPLE = {"type": "multiple", "options": OPTIONS}
letters = st.sets(st.sampled_from("ABCDE"), min_size=1).map(frozenset)


@pytest.fixture(scope="module")
def judge() -> Iterator[RewardManager]:
    with build_reward_manager([K12Reward(name="k12")]) as judge:
        yield judge


def config(**keys: Any) -> K12Reward:
    return K12Reward.model_validate({"name": "k12", **keys})


# -- partial credit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named", "earned"),
    [
        ({}, "AC", 1),
        ({}, "A", 1 / 2),
        ({}, "AB", 0),
        ({}, "ABCDE", 0),
        ({"subset_credit": 0.4}, "A", 0.4),
        ({"subset_credit": 0.4}, "AC", 1),
        ({"subset_credit": 0.4}, "AB", 0),
        ({"multiple": "all"}, "A", 0),
        ({"multiple": "all"}, "AC", 1),
        ({"multiple": "per_option"}, "A", 1 / 2),
        ({"multiple": "per_option"}, "AB", 1 / 2 - 1 / 3),
        ({"multiple": "per_option"}, "ABC", 1 - 1 / 3),
        ({"multiple": "per_option"}, "ABCDE", 0),
        ({"multiple": "per_option"}, "BDE", 0),
    ],
)
def test_rules_of_multiple_choice(keys: dict[str, Any], named: str, earned: float) -> None:
    assert multiple_choice_credit(frozenset("AC"), frozenset(named), OPTIONS, config(**keys)) == pytest.approx(earned)


@given(letters, letters, st.sampled_from("ABCDE"), st.sampled_from(["subset", "all", "per_option"]))
def test_a_right_option_more_never_earns_less_and_a_wrong_one_never_more(
    right: frozenset[str], named: frozenset[str], letter: str, rule: str
) -> None:
    rules = config(multiple=rule)
    before, after = (
        multiple_choice_credit(right, each, OPTIONS, rules) for each in (named - {letter}, named | {letter})
    )
    assert 0 <= before <= 1
    assert after >= before if letter in right else after <= before or named == frozenset(letter)
    assert (multiple_choice_credit(right, named, OPTIONS, rules) == 1) == (named == right)


@given(letters, letters, st.randoms(use_true_random=False), st.sampled_from(["", ", ", "、", " and ", " "]))
@settings(deadline=None, max_examples=60)
def test_the_order_of_the_letters_does_not_matter(
    judge: RewardManager, right: frozenset[str], named: frozenset[str], random: Any, between: str
) -> None:
    written = sorted(named)
    random.shuffle(written)
    found = judged(judge, "".join(sorted(right)), f"The answer is {between.join(written)}.", k12=MULTIPLE)
    assert found.reward == pytest.approx(multiple_choice_credit(right, named, OPTIONS, config()))


def test_guessing_every_option_earns_nothing_by_any_rule() -> None:
    for rule in ("subset", "all", "per_option"):
        with build_reward_manager([config(multiple=rule)]) as judge:
            assert judged(judge, "AC", "ABCDE", k12=MULTIPLE).reward == 0


def test_kendall_is_one_for_the_order_and_minus_one_for_its_reverse() -> None:
    taus = {order: kendall_tau("ABC", order) for order in permutations("ABC")}
    assert taus["A", "B", "C"] == 1
    assert taus["C", "B", "A"] == -1
    assert taus["B", "A", "C"] == pytest.approx(1 / 3)
    assert sum(taus.values()) == pytest.approx(0)


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


# -- hostile text ----------------------------------------------------------------------------------------------

QUESTIONS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "single", "options": OPTIONS}, "B"),
    ({"type": "single"}, "B"),
    (MULTIPLE, "ABD"),
    ({"type": "true_false"}, True),
    ({"type": "blank"}, "photosynthesis"),
    ({"type": "blank", "unordered": True}, ["李白", "杜甫"]),
    ({"type": "numeric", "unit": "km/h"}, "36.25"),
    ({"type": "ordering"}, "BADC"),
    ({"type": "matching"}, {"1": "B", "2": "A", "3": "D"}),
    ({"type": "short", "keywords": [["sunlight"], ["氧气"]]}, None),
]
WRITTEN = (
    "A|B|(C)|D.|and|or|或|、|,|;|\n|is|not|Answer:|答案是|故选|选|正确|true|错误|\\boxed{|}|{|$|\\frac{1}{0}|1/0|km/h|36|1e999"
    "|-|=|≈|百分之|万|①|(1)|→|1-A|2:B|第一空|####|</think>|\\textcircled{9|\ud800|\u200b|٣|∞|NaN|**"
)
WORDS = WRITTEN.split("|")
texts = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join))


@pytest.mark.slow
@given(st.sampled_from(QUESTIONS), texts)
@settings(deadline=None, max_examples=400)
def test_no_text_raises_and_every_reward_is_from_0_to_1(
    judge: RewardManager, asked: tuple[dict[str, Any], Any], text: str
) -> None:
    found = judged(judge, asked[1], text, k12=asked[0])
    assert found.reward is not None
    assert 0 <= found.reward <= 1


@pytest.mark.parametrize(
    "piece", ["A ", '"A', "(", "1,", "1 km ", "一", "\\boxed{", "not ", "-", " ", "Answer:", "\\frac{1}{"]
)
@pytest.mark.parametrize(("column", "answer"), QUESTIONS, ids=[each["type"] for each, _ in QUESTIONS])
def test_long_texts_end(judge: RewardManager, column: dict[str, Any], answer: Any, piece: str) -> None:
    for text in (piece * (40_000 // len(piece)), f"Answer: {piece * (1900 // len(piece))}!"):
        found = judged(judge, answer, text, k12=column).reward
        assert found is not None
        assert found < 1


@given(st.fractions(), st.sampled_from(["km", "克", "h", "m/s", "°C", "元", "平方米", "L"]))
def test_converting_there_and_back_is_exact(value: Fraction, unit: str) -> None:
    others = {"km": "inch", "克": "斤", "h": "天", "m/s": "千米/时", "°C": "K", "元": "角", "平方米": "亩", "L": "cm^3"}
    [one], [other] = parse_units(unit), parse_units(others[unit])
    there = convert_unit(value, one, other)
    assert there is not None
    assert convert_unit(there, other, one) == value


def test_units_of_different_things_do_not_convert() -> None:
    for one, other in [("km", "h"), ("元", "dollar"), ("°", "°C"), ("m^2", "m"), ("J", "N"), ("km/h", "km")]:
        assert convert_unit(Fraction(1), parse_units(one)[0], parse_units(other)[0]) is None


@pytest.mark.parametrize(
    "text", ["__import__('os')", "m**9999999999", "1e9**9e9 m", "km^9", "meter; exit()", "dimensionless"]
)
def test_only_known_words_are_units(text: str) -> None:
    assert parse_units(text) == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("一万零五", 10005),
        ("两千零二十四", 2024),
        ("二〇二四", 2024),
        ("三点一四", Fraction(157, 50)),
        ("三亿五千万", 350_000_000),
        ("十", 10),
        ("1.2万", 12000),
        ("3.5 million", 3_500_000),
        ("零下5", -5),
        ("-0.5", Fraction(-1, 2)),
        ("百分之五十", 50),
        ("二分之零", 0),
    ],
)
def test_numbers_in_words(text: str, value: Fraction | int) -> None:
    found = parse_amount(text)
    assert found is not None
    assert found.value == value


@pytest.mark.parametrize(
    "text", ["5 or 6", "5/0", "零分之一", "一共", "5到6", "about", "五六七x", "x5", "5+6", "1" * 500]
)
def test_what_is_no_single_number(text: str) -> None:
    assert parse_amount(text) is None


@pytest.mark.parametrize("text", ["可能是9页", "8到9页", "大于9", "不是9", "9或8个", "no number here", "2、3"])
def test_sentences_that_do_not_settle_on_a_number(text: str) -> None:
    found = extract_answer(text)
    assert found is None or found.hedged or parse_amount(found.value) is None


# -- tasks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "column", "kind"),
    [
        ("B", {"options": OPTIONS}, "single"),
        ("BD", {"options": OPTIONS}, "multiple"),
        (["B", "D"], {"options": OPTIONS}, "multiple"),
        ("text B", {"options": OPTIONS}, "single"),
        (True, {}, "true_false"),
        ("错误", {}, "true_false"),
        ("12.5", {}, "numeric"),
        (7, {}, "numeric"),
        ("12 km", {}, "numeric"),
        ("photosynthesis", {}, "blank"),
        ("B", {}, "blank"),
        (["5", "10"], {}, "blank"),
        ({"1": "A"}, {}, "matching"),
        (None, {"keywords": ["sun"]}, "short"),
        ("An essay.", {"rubric": "Two reasons."}, "short"),
    ],
)
def test_the_type_is_seen_where_it_is_clear(answer: Any, column: dict[str, Any], kind: str) -> None:
    found = read_question(task(answer, k12=column))
    assert found is not None
    assert found.kind == kind


def test_options_subject_and_grade_may_be_columns_of_their_own(judge: RewardManager) -> None:
    found = judged(judge, "B", "Answer: text B", choices=list(OPTIONS.values()), subject="physics", grade=8)
    assert (found.reward, found.details) == (1, {"k12/physics": 1, "k12/grade-8": 1})


def test_the_reference_may_be_the_words_of_an_option(judge: RewardManager) -> None:
    for text, reward in [("B", 1), ("(B) text B", 1), ("text b", 1), ("C", 0)]:
        assert judged(judge, "text B", text, k12={"type": "single", "options": OPTIONS}).reward == reward


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


@pytest.mark.parametrize("kind", ["single", "true_false", "blank", "ordering", "matching"])
def test_an_endless_answer_is_not_read(judge: RewardManager, kind: str) -> None:
    gold: dict[str, Any] = {"true_false": True, "ordering": "BA", "matching": {"1": "B"}}
    found = judged(judge, gold.get(kind, "B"), "\\boxed{" + "=" * 10_000 + "}", k12={"type": kind})
    assert (found.reward, found.outcomes["k12"]) == (0, "too_long")


def test_an_empty_subject_has_no_metric(judge: RewardManager) -> None:
    assert judged(judge, "B", "B", k12={"type": "single", "subject": " ", "grade": 3}).details == {"k12/grade-3": 1.0}
