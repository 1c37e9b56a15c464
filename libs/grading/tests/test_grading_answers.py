"""Answers that were judged wrongly, the extraction of values, the labelled corpus, and what algebra is not asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from costly_answers import costly_answers
from grading_bench.answer_corpus import Labelled, corpus
from grading_bench.chat_answers import chat_answers
from grading_bench.corpus import BANKS, accepted_by_library, accepted_by_math_verify, counts
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill_grading import MathGrader, SchoolGrader, SchoolQuestion, extract_answer
from rollmill_grading.numerals import find_english_numbers, parse_chinese_numeral
from rollmill_grading.phrase import extract_value

FRUIT = {"A": "apple", "B": "banana", "C": "cherry", "D": "date"}
SEEN: list[tuple[str, str, bool]] = [
    ("10", "The final answer is:\n\\[\n10\n\\]", True),
    ("4a-2", "So we get $4a-2$.", True),
    ("(2,3)", "so the vertex is $(2, 3)$.", True),
    ("y=-2x+5", "The line is $y=-2x+5$.", True),
    ("5", "The line is $y=-2x+5$.", False),
    ("y=-2x+5", "The equation is y=-2x+5", True),
    ("5", "The equation is y=-2x+5", False),
    ("A", "the correct graph is \\(A\\)", True),
    ("12", "The answer is 12, because we have 3 apples", True),
    ("3", "The answer is 12, because we have 3 apples", False),
    ("12", "The answer is `12`", True),
    ("12", "`12`", True),
    ("12", "$\\approx 12$", True),
    ("12", "$\\approx 12.1$", False),
    ("3:4", "The ratio is 6:8.", True),
    ("12", "The answer is not 12", False),
    ("12", "I don't think the answer is 12", False),
    ("12", "\\boxed{12} is wrong, it should be 13", False),
    ("13", "\\boxed{12} is wrong, it should be 13", True),
    ("9", "9. But it might also be 10", False),
    ("10", "9. But it might also be 10", False),
    ("1/2", "The answer is 1/2 or 0.5", True),
    ("16", "She earns $16 per week.", True),
    ("15000", "答案是一万五千", True),
    ("12", "答案是12元", True),
    ("12", "\\boxed{12元}", True),
    ("12", "#### 12个", True),
    ("12", "１２", True),
    ("12", "一共有12个苹果", True),
    ("5", "共5只", True),
    ("5", "有五只猫", True),
    ("5", "5 m", True),
    ("5 m", "答案是500厘米", True),
    ("36", "So the area is 36 cm^2.", True),
    ("2", "So the area is 36 cm^2.", False),
    ("9\\pi", "So the area is 9π cm$^2$, which is about 28.27 cm$^2$.", True),
    ("9\\pi", "The answer is $9\\pi$ cm$^2$, which is about 28.27.", True),
    ("5", "So the acceleration is 5 m/s^2.", True),
    ("12", "So we need 12 boxes if each holds 5.", True),
    ("5", "So we need 12 boxes if each holds 5.", False),
    ("4", "答：可以装4箱，还剩2个。", True),
    ("2", "答：吃了4个，还剩2个。", True),
    ("y'+ry=0", "\\boxed{\\log_1 1}", False),
    ("y'+ry=0", "\\boxed{0}", False),
]
SCHOOL: list[tuple[str, Any, str, bool]] = [
    ("single", "C", "选C。注意：不要选A", True),
    ("single", "A", "选C。注意：不要选A", False),
    ("single", "C", "答案：C（cherry）", True),
    ("single", "C", "只有C符合要求", True),
    ("single", "C", "符合条件的是C", True),
    ("single", "C", "A is wrong; B is wrong; therefore C", True),
    ("single", "A", "A is wrong; B is wrong; therefore C", False),
    ("multiple", "AC", "A正确，B错误，C正确", True),
    ("multiple", "AC", "A and C, but not B or D", True),
    ("multiple", "ABCD", "A and C, but not B or D", False),
    ("blank", ["5", "10"], "The first blank is 5 and the second blank is 10", True),
    ("blank", "3:4", "6:8", True),
    ("numeric", "12", "一共有12个苹果", True),
    ("numeric", "12", "答案是12元", True),
    ("numeric", "12", "\\boxed{12元}", True),
    ("numeric", "12", "#### 12个", True),
    ("numeric", "5", "共5只", True),
    ("numeric", "5", "有五只猫", True),
    ("numeric", "15000", "一万五千", True),
    ("numeric", "12", "The answer is 12, because we have 3 apples", True),
    ("numeric", "12", "`12`", True),
    ("numeric", "12", "\\approx 12", True),
    ("numeric", "12", "The answer is not 12", False),
    ("numeric", "12", "I don't think the answer is 12", False),
    ("numeric", "12", "\\boxed{12} is wrong, it should be 13", False),
    ("numeric", "9", "9. But it might also be 10", False),
]


@pytest.mark.parametrize(("gold", "text", "right"), SEEN)
def test_answers_that_were_judged_wrongly(math: MathGrader, gold: str, text: str, right: bool) -> None:
    assert math.grade(text, gold).correct is right


@pytest.mark.parametrize(("kind", "gold", "text", "right"), SCHOOL)
def test_school_answers_that_were_judged_wrongly(
    school: SchoolGrader, kind: Any, gold: Any, text: str, right: bool
) -> None:
    options = FRUIT if kind in ("single", "multiple") else None
    assert school.grade(text, SchoolQuestion(gold, kind, options)).correct is right


@pytest.mark.parametrize(
    ("phrase", "value"),
    [
        ("the value of $x$ when $y = 3$ is $12$.", "$12$"),
        ("So John has 12 apples left in the basket", "12 apples"),
        ("there are 5 cats (2 black, 3 white)", "5 cats"),
        ("the value was 25 in 2019", "25"),
        ("x = 2 or x = 3", "x = 2 or x = 3"),
        ("12 feet per second", "12 feet per second"),
        ("Each of the 4 friends gets 27 candies", "27 candies"),
        ("2 h 30 min", "2 h 30 min"),
        ("[1, 2) \\cup (3, 4]", "[1, 2) \\cup (3, 4]"),
        ("less than 9", "less than 9"),
        ("increasing, because it grows", "increasing"),
    ],
)
def test_the_value_of_a_phrase(phrase: str, value: str) -> None:
    assert extract_value(phrase, leads=False) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("一万五千", 15000), ("一万五", 15000), ("三百五", 350), ("十五", 15), ("三百零五", 305), ("五只", None)],
)
def test_chinese_numerals(text: str, value: int | None) -> None:
    assert parse_chinese_numeral(text) == value


def test_numbers_in_english_words() -> None:
    assert find_english_numbers("two million three hundred and five, or twenty-one") == [2_000_305, 21]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.sampled_from(
            [
                "\\boxed{",
                "}",
                "$",
                "\\(",
                "\\)",
                "\\[",
                "\\]",
                "```",
                "**",
                "answer is ",
                "答案是",
                "不",
                "not ",
                "or ",
                "12",
                "x=",
                "(",
                ")",
                "\n",
                ". ",
                "should be ",
                "A",
                "、",
                "\\frac{",
                "一万",
            ]
        )
        | st.text(max_size=3),
        max_size=40,
    ).map("".join)
)
def test_finding_an_answer_never_raises(text: str) -> None:
    for values in (True, False):
        found = extract_answer(text, values=values)
        assert found is None or isinstance(found.value, str)


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "$", "answer is ", "(", "12 ", "x=", "\\frac{1}{", "答案是", "**1** ", "\n"]
)
def test_long_texts_are_read_in_time(piece: str) -> None:
    assert extract_answer(piece * (20_000 // len(piece)) + "The answer is 7.") is not None


# -- the corpus ------------------------------------------------------------------------------------------------------

LEFT = {"first": 0, "second": 0, "third": 2, "fourth": 0}
"""Right answers of each bank that are still rejected."""


def bank_of(data: Path, bank: str) -> list[Labelled]:
    rows = [row for row in corpus(data, bank) if row.reward in ("math", "k12")]
    assert len(rows) >= 1500
    return rows


@pytest.mark.parametrize("bank", [*BANKS[:2], *(pytest.param(bank, marks=pytest.mark.slow) for bank in BANKS[2:])])
def test_every_bank_of_the_corpus_is_graded_as_labelled(data_dir: Path, bank: str) -> None:
    rows = bank_of(data_dir, bank)[BANKS.index(bank) :: 4]
    rejected, accepted = counts(rows, accepted_by_library(rows))
    assert accepted == 0
    assert rejected <= LEFT[bank]


def chats() -> list[Labelled]:
    rows = [row for row in chat_answers() if row.reward in ("math", "k12")]
    assert len(rows) >= 500
    return rows


@pytest.mark.slow
def test_all_completions_of_chat_models_against_math_verify() -> None:
    rows = chats()
    rejected, accepted = counts(rows, accepted_by_library(rows))
    peer = counts(rows, accepted_by_math_verify(rows))
    assert rejected <= 3
    assert accepted == 0
    assert 10 * rejected <= peer[0]
    assert peer[1] > 0


@pytest.mark.thorough
@pytest.mark.slow
def test_the_corpus_against_math_verify(data_dir: Path) -> None:
    rows = [row for bank in BANKS for row in bank_of(data_dir, bank)]
    ours, peer = accepted_by_library(rows), accepted_by_math_verify(rows)
    for group in dict.fromkeys(row.group for row in rows):
        chosen = [index for index, row in enumerate(rows) if row.group == group]
        part = [rows[index] for index in chosen]
        rejected, accepted = zip(
            counts(part, [ours[index] for index in chosen]),
            counts(part, [peer[index] for index in chosen]),
            strict=True,
        )
        assert accepted[0] <= accepted[1], group
        assert 2 * rejected[0] <= rejected[1], group
    assert counts(rows, ours) == (sum(LEFT.values()), 0)


# -- the cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_formulas_that_algebra_would_not_finish_are_not_asked_about(math: MathGrader) -> None:
    formulas = costly_answers()
    assert len(set(formulas)) >= 150
    outcomes: Counter[str] = Counter()
    for formula in formulas:
        found = math.grade(f"\\boxed{{{formula}}}", "y'+ry=0")
        assert found.score == 0.0, formula
        outcomes[found.outcome] += 1
    assert outcomes["too_costly"] >= 60
    assert outcomes["timeout"] + outcomes["memory"] <= 3


@pytest.mark.slow
def test_long_references_may_have_long_answers(math: MathGrader) -> None:
    pairs = [
        ("2^{2023}", "2^{2023}-1+1"),
        ("x^{2023}+1", "1+x^{2023}"),
        ("\\frac{1}{1+\\frac{1}{1+\\frac{1}{x}}}", "\\frac{x+1}{2x+1}"),
        ("\\sqrt{2+\\sqrt{2}}", "\\sqrt{\\sqrt{2}+2}"),
        ("20!", "20 \\cdot 19!"),
        ("\\binom{10}{3}", "120"),
    ]
    found = [math.grade(f"\\boxed{{{answer}}}", gold) for gold, answer in pairs]
    assert [(each.score, each.outcome) for each in found] == [(1.0, "ok")] * 6
