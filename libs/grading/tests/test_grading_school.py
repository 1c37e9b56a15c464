"""School questions: partial credit, text that may not raise, units, types of questions, wrong references."""

from __future__ import annotations

import sys
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill_grading import GradingError, MarkingScheme, SchoolGrader, SchoolQuestion, extract_answer
from rollmill_grading.errors import MissingPintError
from rollmill_grading.school import unit_words
from rollmill_grading.school.answer_types import kendall_tau
from rollmill_grading.school.comparison import parse_amount
from rollmill_grading.school.unit_words import convert_unit, parse_units

OPTIONS = {letter: f"text {letter}" for letter in "ABCDE"}
MULTIPLE: dict[str, Any] = {"type": "multiple", "options": OPTIONS}
letters = st.sets(st.sampled_from("ABCDE"), min_size=1).map(frozenset)


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
    assert MarkingScheme(**keys).multiple_choice_credit(frozenset("AC"), frozenset(named), 5) == pytest.approx(earned)


@given(letters, letters, st.sampled_from("ABCDE"), st.sampled_from(["subset", "all", "per_option"]))
def test_a_right_option_more_never_earns_less_and_a_wrong_one_never_more(
    right: frozenset[str], named: frozenset[str], letter: str, rule: Any
) -> None:
    scheme = MarkingScheme(multiple=rule)
    before, after = (scheme.multiple_choice_credit(right, each, 5) for each in (named - {letter}, named | {letter}))
    assert 0 <= before <= 1
    assert after >= before if letter in right else after <= before or named == frozenset(letter)
    assert (scheme.multiple_choice_credit(right, named, 5) == 1) == (named == right)


@given(letters, letters, st.randoms(use_true_random=False), st.sampled_from(["", ", ", "、", " and ", " "]))
@settings(deadline=None, max_examples=60)
def test_the_order_of_the_letters_does_not_matter(
    school: SchoolGrader, right: frozenset[str], named: frozenset[str], random: Any, between: str
) -> None:
    written = sorted(named)
    random.shuffle(written)
    question = SchoolQuestion("".join(sorted(right)), **MULTIPLE)
    found = school.grade(f"The answer is {between.join(written)}.", question)
    assert found.score == pytest.approx(MarkingScheme().multiple_choice_credit(right, named, 5))


def test_guessing_every_option_earns_nothing_by_any_rule() -> None:
    for scheme in (MarkingScheme(), MarkingScheme(multiple="all"), MarkingScheme(multiple="per_option")):
        assert SchoolGrader(scheme).grade("ABCDE", SchoolQuestion("AC", **MULTIPLE)).score == 0


def test_kendall_is_one_for_the_order_and_minus_one_for_its_reverse() -> None:
    taus = {order: kendall_tau("ABC", order) for order in permutations("ABC")}
    assert taus["A", "B", "C"] == 1
    assert taus["C", "B", "A"] == -1
    assert taus["B", "A", "C"] == pytest.approx(1 / 3)
    assert sum(taus.values()) == pytest.approx(0)


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
def test_no_text_raises_and_every_score_is_from_0_to_1(
    school: SchoolGrader, asked: tuple[dict[str, Any], Any], text: str
) -> None:
    assert 0 <= school.grade(text, SchoolQuestion(asked[1], **asked[0])).score <= 1


@pytest.mark.parametrize(
    "piece", ["A ", '"A', "(", "1,", "1 km ", "一", "\\boxed{", "not ", "-", " ", "Answer:", "\\frac{1}{"]
)
@pytest.mark.parametrize(("column", "answer"), QUESTIONS, ids=[each["type"] for each, _ in QUESTIONS])
def test_long_texts_end(school: SchoolGrader, column: dict[str, Any], answer: Any, piece: str) -> None:
    for text in (piece * (40_000 // len(piece)), f"Answer: {piece * (1900 // len(piece))}!"):
        assert school.grade(text, SchoolQuestion(answer, **column)).score < 1


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


# -- questions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "column", "kind"),
    [
        ("B", {"options": OPTIONS}, "single"),
        ("B", {"options": list(OPTIONS.values())}, "single"),
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
    assert SchoolQuestion(answer, **column).kind == kind


def test_the_reference_may_be_the_words_of_an_option(school: SchoolGrader) -> None:
    for text, reward in [("B", 1), ("(B) text B", 1), ("text b", 1), ("C", 0)]:
        assert school.grade(text, SchoolQuestion("text B", "single", OPTIONS)).score == reward


@pytest.mark.parametrize("kind", ["single", "true_false", "blank", "ordering", "matching"])
def test_an_endless_answer_is_not_read(school: SchoolGrader, kind: Any) -> None:
    gold: dict[str, Any] = {"true_false": True, "ordering": "BA", "matching": {"1": "B"}}
    found = school.grade("\\boxed{" + "=" * 10_000 + "}", SchoolQuestion(gold.get(kind, "B"), kind))
    assert (found.score, found.outcome) == (0, "too_long")


@pytest.mark.parametrize(
    ("answer", "keys", "message"),
    [
        ("E", {"options": ["x", "y"], "type": "single"}, "its answer 'E' names no option; the options are A, B"),
        ("AB", {"options": ["x", "y"], "type": "single"}, "has 2 letters; `type` should be multiple"),
        (["1", "2"], {"points": [1]}, r"`points` is \[1\]; give 2 numbers, one for each of the blanks"),
        (["1", "2"], {"synonyms": [["a"]]}, "`synonyms` has 1 lists for 2 blanks"),
        (["1", "2"], {"points": [1, 2], "unordered": True}, "`points` cannot go with `unordered`"),
        ("5 kg", {"unit": "km"}, "its answer is '5 kg', but `unit` is km"),
        ("B", {"type": "single", "points": [2]}, "its `points` does nothing for the type single"),
        ("x", {"rubric": "r", "wrong": ["y"]}, "its `wrong` does nothing without `keywords`"),
        ("x", {"rubric": "Two reasons."}, "it is a short answer; list its key points in `keywords`"),
        ("maybe", {"type": "true_false"}, "is neither true nor false"),
    ],
)
def test_a_wrong_reference_is_an_error_that_says_what_to_do(
    school: SchoolGrader, answer: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(GradingError, match=message):
        school.grade("some answer", SchoolQuestion(answer, **keys))


def test_without_pint_equal_units_are_compared_and_others_are_an_error(
    school: SchoolGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pint", None)
    unit_words._registry.cache_clear()
    unit_words._pint.cache_clear()
    question = SchoolQuestion("5", "numeric", unit="km")
    assert school.grade("5 km", question).correct
    with pytest.raises(MissingPintError, match=r"pip install 'rollmill-grading\[units\]'"):
        school.grade("5000 m", question)
