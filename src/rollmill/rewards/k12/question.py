"""Reads the question of a task from the column `k12`: its type, its reference answer and how to compare it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rollmill.config.rewards.k12 import K12Column, K12Type
from rollmill.errors import RewardError
from rollmill.rewards.answers.comparison import task_options
from rollmill.rewards.answers.normalization import comparison_key
from rollmill.rewards.answers.quantities import normalize_answer, parse_quantity
from rollmill.types import Task

_USED = {"matching": {"points"}, "short": {"points", "rubric", "keywords", "wrong"}}
_USED["blank"] = _USED["numeric"] = {"synonyms", "unordered", "tolerance", "absolute_tolerance", "unit", "points"}
"""Keys of the column that each type supports, in addition to the common ones."""
_ANY = {"type", "answer", "options", "subject", "grade"}
_SURELY_TRUTH = frozenset(["true", "false", "对", "错", "正确", "错误", "√", "×"])


@dataclass(frozen=True, slots=True)
class K12Question:
    """A parsed task: `kind` is resolved, `options` are by letter, and `column` has the rest."""

    kind: K12Type
    answer: Any
    options: dict[str, str]
    column: K12Column

    @property
    def synonyms(self) -> list[list[str]]:
        """A list per blank. A single plain list belongs to the only blank."""
        given = self.column.synonyms
        if given and all(isinstance(each, str) for each in given):
            return [[str(each) for each in given]]
        return [[each] if isinstance(each, str) else each for each in given]

    @property
    def keywords(self) -> list[list[str]]:
        """The alternative wordings of every key point."""
        return [[each] if isinstance(each, str) else each for each in self.column.keywords]

    def points(self, count: int, what: str) -> list[float]:
        """Return the weights of `count` parts.

        Raises RewardError if the task gives another number, or a negative one.
        """
        points = self.column.points or [1.0] * count
        if len(points) != count or min(points) < 0 or sum(points) <= 0:
            raise RewardError(f"`k12.points` is {points}; give {count} numbers, one for each of the {what}")
        return points


def read_question(task: Task) -> K12Question | None:
    """Parse the question of a task; None if it has neither an answer nor criteria for a short answer.

    Raises RewardError if the column `k12` is invalid, or has a key that its type does not support.
    """
    given = task.metadata.get("k12")
    if given is not None and not isinstance(given, Mapping):
        raise RewardError(f"its column `k12` is {given!r:.80}; it has to be a mapping such as {{type: single}}")
    try:
        column = K12Column.model_validate(dict(given or {}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RewardError(f"its `k12.{place}` is wrong: {first['msg']}") from error
    answer = task.answer if column.answer is None else column.answer
    options = task_options({"options": column.options} if column.options else task.metadata)
    kind = column.type or _kind(answer, options, column)
    if answer is None and kind != "short":
        return None
    unsupported = [name for name, value in column if value and name not in _ANY | _USED.get(kind, set())]
    if unsupported:
        raise RewardError(
            f"its `k12.{unsupported[0]}` does nothing for the type {kind}; remove it, or give another type"
        )
    if column.wrong and not column.keywords:
        raise RewardError("its `k12.wrong` does nothing without `k12.keywords`; give both, or say it in the rubric")
    for name in ("subject", "grade"):
        if getattr(column, name) is None and isinstance(found := task.metadata.get(name), str | int):
            column = column.model_copy(update={name: found})
    return K12Question(kind=kind, answer=answer, options=options, column=column)


def _kind(answer: Any, options: dict[str, str], column: K12Column) -> K12Type:
    """Infer the question type from the answer."""
    if column.rubric is not None or column.keywords:
        return "short"
    if isinstance(answer, bool) or (isinstance(answer, str) and answer.strip().lower() in _SURELY_TRUTH):
        return "true_false"
    if isinstance(answer, Mapping):
        return "matching"
    if options:
        return "single" if isinstance(answer, str) and len(_letters(answer, options)) == 1 else "multiple"
    if isinstance(answer, int | float) or (
        isinstance(answer, str) and parse_quantity(normalize_answer(answer)) is not None
    ):
        return "numeric"
    return "blank"


def _letters(answer: str, options: dict[str, str]) -> str:
    """Return the letters of a reference such as `ACD` or `A, C`, or the letter of the option with its text."""
    same = [letter for letter, option in options.items() if comparison_key(option) == comparison_key(answer)]
    plain = re.sub(r"[\W_]", "", answer)
    return same[0] if len(plain) > 1 and len(same) == 1 else plain.upper() if len(plain) == 1 else plain


def correct_options(question: K12Question) -> frozenset[str]:
    """Return the letters of the right options. Raises RewardError if the reference names none, or an unknown one."""
    given = question.answer
    parts = [str(each) for each in given] if isinstance(given, list | tuple) else [str(given)]
    letters = frozenset("".join(_letters(part, question.options) for part in parts))
    unknown = letters - question.options.keys() if question.options else set()
    if not letters or unknown or not all(re.fullmatch("[A-Z]", letter) for letter in letters):
        listed = f"; the options are {', '.join(question.options)}" if question.options else ""
        raise RewardError(f"its answer {given!r:.80} names no option{listed}; give letters such as B or ACD")
    if question.kind == "single" and len(letters) != 1:
        raise RewardError(f"its answer {given!r:.80} has {len(letters)} letters; `k12.type` should be multiple")
    return letters
