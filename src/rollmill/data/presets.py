"""Presets for published data sets: convert their rows to the columns prompt, answer and response."""

from __future__ import annotations

import re
from typing import Any

from rollmill.data.readers import BadRowError, Row
from rollmill.data.template import describe_type

# School questions: each row becomes prompt, answer and the column `k12`.

_UNIT = re.compile(
    r"(?:多少|几)个?(平方千米|平方公里|平方米|平方分米|平方厘米|平方毫米|立方米|立方分米|立方厘米|公顷|千米|公里|分米|厘米|毫米|米"
    r"|千克|公斤|克|吨|毫升|升|小时|分钟|秒|元)(?![/每粒饭线拉])"
)
_OPTION = re.compile(r"(?<![A-Za-z\\])([A-D])\s*[.．、]\s*")
_BLANK = re.compile(r"\$?\(\\quad\)\$?|_{3,}")
_CIRCLED = re.compile(r"(?:\\textcircled\{?\d\}?|[①-⑳])+")
_RELATION = re.compile(r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![A-Za-z])")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def cmath(row: Row) -> Row:
    """Convert a row of CMATH (Wei et al. 2023, arXiv:2306.16636): Chinese word problems of grades 1 to 6.

    The unit is the last one in the question (`多少千克`), if it is a measure.
    """
    question, answer = _text(row, "question"), _text(row, "answer")
    found = _UNIT.findall(question)
    column = {"type": "numeric", "subject": "mathematics", "grade": _required(row, "grade")}
    return row | {"prompt": question, "answer": answer, "k12": column | ({"unit": found[-1]} if found else {})}


def cn_middle_school(row: Row) -> Row:
    """Convert a row of CN Middle School 24: choices with their options in the question, and open questions with one
    or more comma-separated values. Repairs `\\neq`, which the file has as a line break and `eq`."""
    question, answer = (_text(row, column).replace("\neq", "\\neq") for column in ("question", "answer"))
    letter = row.get("choice_answer") or ""
    column: dict[str, Any] = {"subject": "mathematics", "grade": "middle_school"}
    if letter:
        options = _options_in(question)
        column |= {"type": "single"} | ({"options": options} if letter in options else {})
        return row | {"prompt": question, "answer": letter, "k12": column}
    return row | {"prompt": question, "answer": _values(answer), "k12": column | {"type": "blank"}}


def gaokao_qa(row: Row) -> Row:
    """Convert a choice question of GAOKAO-Bench in the layout of AGIEval (arXiv:2304.06364): options by letter, one or
    more of them correct. The prompt has the options below the question."""
    question, label = _text(row, "question"), _text(row, "label")
    options = _required(row, "options")
    if not isinstance(options, dict) or not options:
        raise BadRowError(f"column options is {describe_type(options)}, not an object with the options by letter")
    letters = re.sub(r"\s", "", label)
    several = len(letters) > 1
    column = {"type": "multiple" if several else "single", "options": options, **_GAOKAO}
    return row | {"prompt": _with_options(question, options), "answer": letters, "k12": column}


def gaokao_cloze(row: Row) -> Row:
    """Convert a fill-in-the-blank question of the same layout; semicolons separate the answers of several blanks.

    Blanks that are separated only by commas in the question may be filled in any order.
    """
    question, answer = _text(row, "question"), _text(row, "answer")
    if _CIRCLED.fullmatch(answer.strip("$")) and "依次" in question:
        return row | {"prompt": question, "answer": answer.strip("$"), "k12": {"type": "ordering", **_GAOKAO}}
    parts = [part for part in re.split(r"[;；]", answer) if part.strip()]
    between = [re.sub(r"[\s,，、;；$]", "", text) for text in _BLANK.split(question)[1:-1]]
    unordered = len(parts) > 1 and len(between) == len(parts) - 1 and not any(between)
    column = {"type": "blank", **_GAOKAO} | ({"unordered": True} if unordered else {})
    return row | {"prompt": question, "answer": parts, "k12": column}


def mmlu(row: Row) -> Row:
    """Convert a row of MMLU (Hendrycks et al. 2021, arXiv:2009.03300): choices, index of the correct one, a subject.

    The prompt has the options below the question; the grade of `high_school_physics` is `high_school`.
    """
    question, choices, right = _text(row, "question"), _required(row, "choices"), _required(row, "answer")
    if not isinstance(choices, list) or not choices:
        raise BadRowError(f"column choices is {describe_type(choices)}, not a list of options")
    if not isinstance(right, int) or not 0 <= right < len(choices):
        raise BadRowError(f"column answer is {right!r}, not the number of one of {len(choices)} choices, from 0")
    options = {chr(ord("A") + index): str(choice) for index, choice in enumerate(choices)}
    subject = row.get("subject") or row.get("type")
    column: dict[str, Any] = {"type": "single", "options": options, "subject": subject}
    grade = re.match(r"elementary|high_school|college", str(subject))
    column |= {"grade": grade[0]} if grade else {}
    return row | {"prompt": _with_options(question, options), "answer": chr(ord("A") + right), "k12": column}


_GAOKAO: dict[str, Any] = {"subject": "mathematics", "grade": 12}


def _required(row: Row, column: str) -> Any:
    if row.get(column) is None:
        raise BadRowError(f"no column {column} (columns: {', '.join(row)})")
    return row[column]


def _text(row: Row, column: str) -> str:
    value = _required(row, column)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"column {column} is {describe_type(value) if value != '' else 'empty'}, not text")
    return value


def _with_options(question: str, options: dict[str, str]) -> str:
    return question + "".join(f"\n{letter}. {option}" for letter, option in options.items())


def _options_in(question: str) -> dict[str, str]:
    """The options A to D that end a question; empty unless each appears once, in order."""
    marks = list(_OPTION.finditer(question))[-4:]
    if [mark[1] for mark in marks] != list("ABCD"):
        return {}
    ends = [*(mark.start() for mark in marks[1:]), len(question)]
    return {mark[1]: question[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def _values(answer: str) -> list[str]:
    """Split at commas outside brackets; several conditions (`x > 1, x < 3`) stay one value."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(answer):
        depth += _BRACKETS.get(sign, 0)
        if sign in ",，;；" and depth == 0:
            parts.append(answer[start:at].strip())
            start = at + 1
    parts.append(answer[start:].strip())
    return [answer] if len(parts) > 1 and all(_RELATION.search(part) for part in parts) else parts


K12_PRESETS = {
    "cmath": cmath,
    "cn_middle_school": cn_middle_school,
    "gaokao_qa": gaokao_qa,
    "gaokao_cloze": gaokao_cloze,
    "mmlu": mmlu,
}


# Mathematics and code

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_MARK = "####"


def gsm8k(row: Row) -> Row:
    """Convert a row of GSM8K (Cobbe et al. 2021, arXiv:2110.14168), whose answer is a solution that ends in `#### N`.

    Adds prompt (the question), answer (N without thousands separators), response (the solution with its `####` line and
    without calculator marks <<...>>) and solution (the same without the `####` line).
    """
    for column in ("question", "answer"):
        if column not in row:
            raise BadRowError(f"no column {column} (columns: {', '.join(row)})")
        if not isinstance(row[column], str):
            raise BadRowError(f"column {column} is {describe_type(row[column])}, not text")
    response = _CALCULATOR.sub("", row["answer"])
    solution, mark, answer = response.rpartition(_MARK)
    if not mark or not answer.strip():
        raise BadRowError(f"the answer has no number after {_MARK}")
    return row | {
        "prompt": row["question"],
        "answer": answer.strip().replace(",", ""),
        "response": response,
        "solution": solution.rstrip(),
    }


def humaneval(row: Row) -> Row:
    """Convert a row of HumanEval (Chen et al. 2021, arXiv:2107.03374).

    Adds prefix (the prompt, which the code continues) for the code reward, and response (the solution) for
    demonstrations.
    """
    for column in ("task_id", "prompt", "entry_point", "test", "canonical_solution"):
        if not isinstance(row.get(column), str):
            found = (
                f"column {column} is {describe_type(row[column])}, not text" if column in row else f"no column {column}"
            )
            raise BadRowError(f"{found} (columns: {', '.join(row)})")
    return row | {"prefix": row["prompt"], "response": row["canonical_solution"]}


PRESETS = {"gsm8k": gsm8k, "humaneval": humaneval, **K12_PRESETS}
