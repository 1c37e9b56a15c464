"""Counts, text, charts, tables and questions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rule_helpers import reward, verdict

from rollmill.errors import RewardError
from rollmill.rewards.builtin.table import read_table
from rollmill.rewards.builtin.vqa import normalize_vqa_answer, vqa_accuracy
from rollmill.rewards.vision.numbers import find_stated_number, parse_chart_number


@pytest.mark.parametrize(
    ("gold", "text", "exact", "relative"),
    [
        (3, "3", 1.0, 1.0),
        (3, "There are three cats.", 1.0, 1.0),
        ("3", "I see 2 and 1, so 3.0.", 1.0, 1.0),
        (4, "3", 0.0, 0.75),
        (3, "3.5", 0.0, 1 - 0.5 / 3),
        (1200, "about 1,200", 1.0, 1.0),
        (12, r"\approx 12", 1.0, 1.0),
        (12, r"$\approx 12$", 1.0, 1.0),
        (12, r"\approx 13", 0.0, 1 - 1 / 12),
        (0, "none", 1.0, 1.0),
        (0, "1", 0.0, 0.0),
        (3, "-3", 0.0, 0.0),
        (5, "3-5", 0.0, 0.0),
        (3, "3 or 4 or 5", 0.0, 0.0),  # naming many does not help
        (5, "3 or 4 or 5", 0.0, 0.0),
        (3, "1e400", 0.0, 0.0),
        (3, "9" * 5000, 0.0, 0.0),
        (3, "²", 0.0, 0.0),
        (3, "_3_ or **3**", 1.0, 1.0),
        (3, "The count is _3_.", 1.0, 1.0),
        (25, "twenty-five cats", 1.0, 1.0),
        (5, "twenty-five", 0.0, 0.0),
        (1, "one hundred", 0.0, 0.0),
        (205, "Two hundred and five", 1.0, 1.0),
        (2345, "two thousand three hundred forty five", 1.0, 1.0),
        (24, "two dozen", 1.0, 1.0),
        (300_000, "three hundred thousand", 1.0, 1.0),
        (500, "two hundred, five hundred", 1.0, 1.0),
        (3, "hundred " * 240, 0.0, 0.0),
        (3, "one hundred " * 160, 0.0, 0.0),
        (20, "twenty, of which one sleeps", 1.0, 1.0),
        (3, "one two three", 1.0, 1.0),
    ],
)
def test_count(gold: Any, text: str, exact: float, relative: float) -> None:
    assert reward("count", gold, text) == exact
    assert reward("count", gold, text, credit="relative") == pytest.approx(relative)


def test_counts_without_a_number_and_wrong_references() -> None:
    assert verdict("count", 3, "some cats") == (0.0, "no_answer")
    assert verdict("count", 3, "<answer>3", tag="answer") == (0.0, "no_answer")
    assert reward("count", None, "3") is None
    for gold in ("many", True, -1, "5%", [3]):
        with pytest.raises(RewardError, match="the count reward needs a number of at least 0"):
            reward("count", gold, "3")


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "text", "anls", "cer"),
    [
        ("hello world", "Hello  World\n", 1.0, 1.0),
        ("kitten", "sitting", 1 - 3 / 7, 1 - 3 / 6),
        ("abcd", "abxy", 0.5, 0.5),
        ("abcd", "axyz", 0.0, 0.0),
        (["paris", "Paris, France"], "paris france", 1 - 1 / 13, 1 - 1 / 13),
        ("abc", "", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("", "a", 0.0, 0.0),
        (42, "42", 1.0, 1.0),
        ("abc", "abc" * 30_000, 0.0, 0.0),
        ("ab" * 10_000, "ab" * 9_000 + "xx" * 1_000, 0.9, 0.9),  # long ones are compared in a thread
    ],
)
def test_ocr(gold: Any, text: str, anls: float, cer: float) -> None:
    pytest.importorskip("rapidfuzz")
    assert reward("ocr", gold, text) == pytest.approx(anls)
    assert reward("ocr", gold, text, measure="cer") == pytest.approx(cer)


@given(st.text(max_size=30), st.text(max_size=30))
def test_ocr_properties(gold: str, text: str) -> None:
    pytest.importorskip("rapidfuzz")
    anls = reward("ocr", gold, text)
    assert 0.5 <= anls <= 1 or anls == 0
    assert reward("ocr", text, gold) == anls
    assert 0 <= reward("ocr", gold, text, measure="cer", threshold=0) <= 1
    assert reward("ocr", gold, gold) == 1


def test_ocr_keys() -> None:
    pytest.importorskip("rapidfuzz")
    assert reward("ocr", "Ab c", "abc", ignore_spaces=True) == 1
    assert reward("ocr", "Abcd", "abcd", ignore_case=False) == 0.75
    assert reward("ocr", "abcd", "abce", threshold=0.8) == 0
    assert verdict("ocr", "a", "a" * 250_000) == (0.0, "too_long")
    with pytest.raises(RewardError, match="expected text, or a list of texts that are right"):
        reward("ocr", [], "a")


# -- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("100", "95", True),
        ("100", "105.0", True),
        ("100", "105.1", False),
        ("100", "94.9", False),
        ("-10", "−10.4", True),
        ("10", "-10", False),
        ("0", "0.0", True),
        ("0", "0.001", False),
        (0.25, "25%", True),
        ("25%", "25", True),
        ("25%", "0.26", True),
        ("25%", "2.5", False),
        ("25", "25 %", True),
        ("0.5", "0.5%", False),
        ("1,234", "$1234", True),
        ("-5", "-$5", True),
        ("-$5", "$-5.1", True),
        ("-5", "$5", False),
        ("12,34", "1234", False),  # not thousands
        ("12", r"\approx 12", True),
        ("12", r"$\approx 12$", True),
        ("12", r"\approx 14", False),
        ("2019", "2018", False),
        (2019, "2019.", True),
        ("1899", "1900", True),
        ("Italy", " italy.", True),
        ("Italy", "Italia", False),
        ("Yes", "No", False),
        ("Yes", "Yes, there is one.", True),
        ("Yes", "Yes, I looked closely. The answer is no.", False),
        ("No", "Yes, I looked closely. The answer is no.", True),
        ("14", "The answer is 14", True),
        ("14", "14 15", False),
        ("14", "nan", False),
        ("14", "inf", False),
        ("14", "1e999", False),
    ],
)
def test_relaxed_accuracy(gold: Any, text: str, right: bool) -> None:
    assert reward("chart", gold, text) == float(right)


def test_chart_keys_and_lists() -> None:
    assert reward("chart", "2019", "1950", exact_years=False) == 1  # as published
    assert reward("chart", "100", "101", tolerance=0) == 0
    assert reward("chart", ["Italy", "10"], "Italy, 10.1") == 1
    assert reward("chart", ["Italy", "10"], "[Italy; 10]") == 1
    assert reward("chart", ["Italy", "10"], "10, Italy") == 0
    assert reward("chart", ["Trinidad and Tobago", "1,000"], "Trinidad and Tobago, 1,000") == 1
    assert reward("chart", ["a", "b"], "a and b") == 1
    assert reward("chart", ["Washington, DC", "5"], "Washington, DC; 5") == 1
    assert reward("chart", ["a", "b"], "a, b, c") == 0
    assert verdict("chart", "a", " ") == (0.0, "no_answer")
    assert verdict("chart", "a", "a" * 3000) == (0.0, "too_long")


@given(st.text(max_size=60))
def test_numbers_of_any_text(text: str) -> None:
    assert parse_chart_number(text) is None or parse_chart_number(text) == parse_chart_number(f" {text} ")
    assert find_stated_number(text) is None or parse_chart_number(text) in (None, find_stated_number(text))
    assert reward("chart", "12", text) in (0.0, 1.0)


# -- tables ----------------------------------------------------------------------------------------------------------

TABLE = "| city | 2020 | 2021 |\n|---|---:|:--|\n| Rome | 1,000 | 2 |\n| Paris | 3 | 4 |"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (TABLE, 1.0),
        ("Here:\n\n" + TABLE + "\n\nDone.", 1.0),
        ("city | 2021 | 2020\n--- | --- | ---\n**paris** | 4.0 | 3\nRome | 2 | 1000", 1.0),
        ('city,2020,2021\nRome,"1,000",2\nParis,3,4', 1.0),
        ("```csv\ncity;2020;2021\nRome;1000;2\nParis;3;4\n```", 1.0),
        ("city\t2020\t2021\nRome\t1000\t2\nParis\t3\t4", 1.0),
        ('[{"city": "Rome", "2020": 1000, "2021": 2}, {"city": "Paris", "2020": 3, "2021": 4}]', 1.0),
        ('{"columns": ["city", "2020", "2021"], "data": [["Rome", 1000, 2], ["Paris", 3, 4]]}', 1.0),
        (TABLE.replace("| 4 |", "| 5 |"), 3 / 4),
        (TABLE.replace("| 4 |", "| |"), 6 / 7),
        (TABLE + "\n| Rome | 1,000 | 2 |", 4 * 2 / 10),  # a row again
        (TABLE + "".join(f"\n| City{n} | {n} | {n} |" for n in range(48)), 8 / 104),
        ("| city | 2020 |\n|---|---|\n| Rome | 1000 |", 2 / 5),
        (TABLE + "\n\nor\n\n| city | 2020 |\n|---|---|\n| Oslo | 1 |", 0.0),  # the last table counts
    ],
)
def test_tables(text: str, value: float) -> None:
    assert reward("table", TABLE, text) == pytest.approx(value)


def test_table_references_tolerance_and_what_is_none() -> None:
    rows = [["city", "n"], ["Rome", 100], ["Rome", 7]]
    assert reward("table", rows, "city,n\nRome,100\nRome,7") == 1
    assert reward("table", rows, "city,n\nRome,101\nRome,7") == 0.5
    assert reward("table", rows, "city,n\nRome,101\nRome,7", tolerance=0.01) == 1
    assert reward("table", [{"city": "Rome", "n": "7%"}], "city,n\nRome,7") == 0
    assert reward("table", [["n"], ["1"], ["2"]], "| n |\n|---|\n| 1 |\n| 3 |") == 0.5
    assert verdict("table", rows, "no table, here") == (0.0, "no_table")
    assert verdict("table", rows, "5") == (0.0, "no_table")
    many = "[" + ",".join(f'{{"k{n}": 1}}' for n in range(5000)) + "]"
    assert verdict("table", rows, many) == (0.0, "no_table")
    assert verdict("table", rows, "a,b\n" * 20_000) == (0.0, "too_many")
    assert verdict("table", rows, "|-|\n" * 30_000) == (0.0, "too_long")
    large = [["n"], *([str(number)] for number in range(10_000))]
    for gold, message in (
        ([["a", "b"], ["x", ""]], "are all empty"),
        ([["a"], ["", "x"]], "are all empty"),
        (large, "more than 10000 cells"),
    ):
        with pytest.raises(RewardError, match=message):
            reward("table", gold, "a,b\n1,2")
    for gold in ("no table", 5, [], [["city", "n"]], {"a": 1}):
        with pytest.raises(RewardError, match="expected a table with headings"):
            reward("table", gold, "a,b\n1,2")


@given(st.text(alphabet='|-:,;\n\t "ab1[]{}`', max_size=120))
def test_any_text_is_a_table_or_none(text: str) -> None:
    rows = read_table(text)
    assert rows is None or all(isinstance(cell, str) for row in rows for cell in row)
    assert 0 <= reward("table", TABLE, text) <= 1


# -- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("agreeing", "expected"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_golden_numbers(agreeing: int, expected: float) -> None:
    """The official evaluation leaves out one person at a time (arXiv:1505.00468; visualqa.org/evaluation)."""
    assert reward("vqa", ["yes"] * agreeing + ["no"] * (10 - agreeing), "Yes") == pytest.approx(expected)


@given(
    st.lists(st.sampled_from(["yes", "no", "2", "two", "a cat"]), min_size=4, max_size=10),
    st.sampled_from(["yes", "2", "cat"]),
)
def test_vqa_accuracy_is_the_mean_over_leaving_one_out(golds: list[str], answer: str) -> None:
    folded = [normalize_vqa_answer(gold) for gold in golds]
    rounds = [folded[:i] + folded[i + 1 :] for i in range(len(folded))]
    expected = sum(min(1, sum(each == normalize_vqa_answer(answer) for each in others) / 3) for others in rounds) / len(
        rounds
    )
    assert vqa_accuracy(answer, golds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("The Cat.", "cat"),
        ("a red, round ball", "red round ball"),
        ("two", "2"),
        ("none", "0"),
        ("don't", "dont"),
        ("1,000", "1000"),
        ("black/white", "black white"),
        ("t-shirt", "t shirt"),
        ("3.5", "3.5"),
        (" yes\n", "yes"),
    ],
)
def test_vqa_normalisation(one: str, other: str) -> None:
    assert normalize_vqa_answer(one) == normalize_vqa_answer(other)


def test_vqa_differences_and_short_lists() -> None:
    assert normalize_vqa_answer("3.5") != normalize_vqa_answer("35")
    assert normalize_vqa_answer("twelve") != normalize_vqa_answer("12")
    assert reward("vqa", ["cat", "kitten"], "a kitten") == reward("vqa", "cat", "Cat") == 1
    assert reward("vqa", ["cat", "kitten"], "cat kitten") == 0
    assert reward("vqa", "A", "a") == 1  # a letter that the picture shows, not an article
    assert reward("vqa", "A", "the") == reward("vqa", "A", "?!") == reward("vqa", "?", "!") == 0
    assert normalize_vqa_answer("on/-off t-shirt") == "on off t shirt"  # every mark is looked at in the text as it was
    assert verdict("vqa", ["yes"] * 10, "yes no " * 100) == (0.0, "too_long")
    assert verdict("vqa", ["yes"] * 10, "") == (0.0, "no_answer")
