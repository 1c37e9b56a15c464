"""Layouts of school questions: what becomes of a row, and which rows are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.config.taskset import TasksetConfig
from rollmill.data.readers import BadRowError, SourceRow
from rollmill.data.task_builder import TaskBuilder
from rollmill.types import Task

MATHEMATICS = {"subject": "mathematics"}


def task_of(preset: str, row: dict[str, Any]) -> Task:
    config = TasksetConfig.model_validate({"path": "rows.jsonl", "preset": preset})
    return TaskBuilder(config, "rows").task(SourceRow("rows.jsonl:1", row), 0)


@pytest.mark.parametrize(
    ("question", "unit"),
    [
        ("1吨稻谷可碾米多少千克？", "千克"),
        ("面积是多少平方厘米？", "平方厘米"),
        ("体积是多少立方米？", "立方米"),
        ("需要几个小时？", "小时"),
        ("长多少厘米？宽多少分米？", "分米"),
        ("每小时行多少千米？", "千米"),
        ("还剩多少页没有看？", None),
        ("共有多少米粒?", None),
        ("速度是多少米/秒？", None),
    ],
)
def test_cmath_reads_the_unit_that_is_asked_for(question: str, unit: str | None) -> None:
    task = task_of("cmath", {"question": question, "answer": "9", "grade": 3})
    column = {"type": "numeric", **MATHEMATICS, "grade": 3} | ({"unit": unit} if unit else {})
    assert (task.prompt, task.answer, task.metadata["k12"]) == (question, "9", column)


@pytest.mark.parametrize(
    ("row", "answer", "column"),
    [
        (
            {"question": "x²=( )\nA.1  B. -1\nC．√2 D、0", "answer": "1", "choice_answer": "A"},
            "A",
            {"type": "single", "options": {"A": "1", "B": "-1", "C": "√2", "D": "0"}},
        ),
        ({"question": "which?", "answer": "1", "choice_answer": "A"}, "A", {"type": "single"}),
        ({"question": "1+1", "answer": "2", "choice_answer": ""}, ["2"], {"type": "blank"}),
        ({"question": "roots", "answer": "(1,2), 3"}, ["(1,2)", "3"], {"type": "blank"}),
        ({"question": "where", "answer": "x>1, x<2"}, ["x>1, x<2"], {"type": "blank"}),
        ({"question": "where", "answer": "x>1, x \neq 2"}, ["x>1, x \\neq 2"], {"type": "blank"}),
    ],
)
def test_cn_middle_school(row: dict[str, Any], answer: Any, column: dict[str, Any]) -> None:
    task = task_of("cn_middle_school", row)
    assert (task.answer, task.metadata["k12"]) == (answer, MATHEMATICS | {"grade": "middle_school"} | column)


@pytest.mark.parametrize(
    ("question", "answer", "kept", "column"),
    [
        ("$a=(\\quad)$", "$2$", ["$2$"], {"type": "blank"}),
        ("$a=(\\quad)$, $b=(\\quad)$", "$5$;$10$", ["$5$", "$10$"], {"type": "blank"}),
        ("$(\\quad)$, $(\\quad)$", "1；2", ["1", "2"], {"type": "blank", "unordered": True}),
        (
            "序号是(\\quad)",
            "$\\textcircled{1}\\textcircled{3}$",
            ["$\\textcircled{1}\\textcircled{3}$"],
            {"type": "blank"},
        ),
        ("编号依次为(\\quad)", "$②⑤$", "②⑤", {"type": "ordering"}),
    ],
)
def test_gaokao_cloze(question: str, answer: str, kept: Any, column: dict[str, Any]) -> None:
    task = task_of("gaokao_cloze", {"question": question, "answer": answer, "options": None})
    assert (task.answer, task.metadata["k12"]) == (kept, column | MATHEMATICS | {"grade": 12})


def test_options_stand_below_the_question() -> None:
    row = {"question": "1+1?", "options": {"A": "1", "B": "2"}, "label": "A B"}
    task = task_of("gaokao_qa", row)
    assert (task.prompt, task.answer, task.metadata["k12"]["type"]) == ("1+1?\nA. 1\nB. 2", "AB", "multiple")
    row = {"question": "1+1?", "choices": ["1", 2], "answer": 1, "type": "elementary_mathematics"}
    task = task_of("mmlu", row)
    assert (task.prompt, task.answer) == ("1+1?\nA. 1\nB. 2", "B")
    options = {"A": "1", "B": "2"}
    assert task.metadata["k12"] == {
        "type": "single",
        "options": options,
        "subject": "elementary_mathematics",
        "grade": "elementary",
    }


@pytest.mark.parametrize(
    ("preset", "row", "message"),
    [
        ("cmath", {"question": "x", "answer": "1"}, r"no column grade \(columns: question, answer\)"),
        ("cmath", {"question": "x", "answer": "", "grade": 1}, "column answer is empty, not text"),
        ("cn_middle_school", {"question": 5, "answer": "1"}, "column question is a number, not text"),
        ("gaokao_qa", {"question": "x", "label": "A"}, "no column options"),
        ("gaokao_qa", {"question": "x", "label": "A", "options": "none"}, "column options is text, not an object"),
        ("gaokao_cloze", {"question": "x", "answer": None}, "no column answer"),
        ("mmlu", {"question": "x", "choices": "ab", "answer": 0}, "column choices is text, not a list"),
        ("mmlu", {"question": "x", "choices": ["a"], "answer": 1}, "column answer is 1, not the number of one of 1"),
    ],
)
def test_rows_that_do_not_fit_say_why(preset: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRowError, match=message):
        task_of(preset, row)
