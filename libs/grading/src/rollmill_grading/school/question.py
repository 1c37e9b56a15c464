"""A school question: its type, its reference answer and how to compare it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollmill_grading.comparison import option_texts
from rollmill_grading.errors import GradingError
from rollmill_grading.normalization import comparison_key
from rollmill_grading.quantities import normalize_answer, parse_quantity

QuestionType = Literal["single", "multiple", "true_false", "blank", "numeric", "ordering", "matching", "short"]

_USED = {"matching": {"points"}, "short": {"points", "rubric", "keywords", "wrong"}}
_USED["blank"] = _USED["numeric"] = {"synonyms", "unordered", "tolerance", "absolute_tolerance", "unit", "points"}
"""Fields that each type uses, in addition to the common ones."""
_COMMON = {"answer", "type", "options", "key_prefix", "kind", "by_letter"}
_SURELY_TRUTH = frozenset(["true", "false", "对", "错", "正确", "错误", "√", "×"])


@dataclass(frozen=True)
class SchoolQuestion:
    """A question with its right answer.

    Raises GradingError if a field is given that the type does not use.

    Args:
        answer: the reference: option letters or an option's text, a truth value, text or a number, a list with an entry
            for each blank, an order (`BADC`), pairs (`{1: "B", 2: "A"}`).
        type: `auto` infers it from the answer.
        options: texts of the options, by letter or in order.
        synonyms: other accepted texts: a list per blank; for a single blank also one plain list.
        unordered: the blanks may be filled in any order.
        tolerance: accepted relative error of numbers. Default: the grader's.
        absolute_tolerance: accepted absolute error in the unit of the reference; the larger of the two counts.
        unit: unit of the reference: `km/h`, `千克`.
        points: weights of the blanks, pairs or key points.
        rubric: criteria of a short answer, for a judge of the caller.
        keywords: key points of a short answer; a list holds alternative wordings of one point.
        wrong: texts that a right short answer must not contain.
        key_prefix: what precedes these names in the caller's data, for errors.
    """

    answer: Any
    type: QuestionType | Literal["auto"] = "auto"
    options: Mapping[str, Any] | Sequence[Any] | None = None
    synonyms: Sequence[str | Sequence[str]] = ()
    unordered: bool = False
    tolerance: float | None = None
    absolute_tolerance: float = 0.0
    unit: str | None = None
    points: Sequence[float] = ()
    rubric: str | None = None
    keywords: Sequence[str | Sequence[str]] = ()
    wrong: Sequence[str] = ()
    key_prefix: str = ""
    kind: QuestionType = field(init=False)
    by_letter: dict[str, str] = field(init=False)
    """The texts of the options."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_letter", option_texts(self.options))
        object.__setattr__(self, "kind", self._inferred_type() if self.type == "auto" else self.type)
        used = _COMMON | _USED.get(self.kind, set())
        unused = [each.name for each in fields(self) if each.name not in used and getattr(self, each.name)]
        if unused:
            raise GradingError(
                f"its `{self.key_prefix}{unused[0]}` does nothing for the type {self.kind}; remove it, or give another "
                "type"
            )
        if self.wrong and not self.keywords:
            wrong, keywords = f"{self.key_prefix}wrong", f"{self.key_prefix}keywords"
            raise GradingError(f"its `{wrong}` does nothing without `{keywords}`; give both, or say it in the rubric")

    def _inferred_type(self) -> QuestionType:
        answer = self.answer
        if self.rubric is not None or self.keywords:
            return "short"
        if isinstance(answer, bool) or (isinstance(answer, str) and answer.strip().lower() in _SURELY_TRUTH):
            return "true_false"
        if isinstance(answer, Mapping):
            return "matching"
        if self.by_letter:
            return "single" if isinstance(answer, str) and len(self._letters(answer)) == 1 else "multiple"
        if isinstance(answer, int | float) or (
            isinstance(answer, str) and parse_quantity(normalize_answer(answer)) is not None
        ):
            return "numeric"
        return "blank"

    def _letters(self, answer: str) -> str:
        """Return the letters of a reference such as `ACD` or `A, C`, or the letter of the option with its text."""
        same = [letter for letter, text in self.by_letter.items() if comparison_key(text) == comparison_key(answer)]
        plain = re.sub(r"[\W_]", "", answer)
        return same[0] if len(plain) > 1 and len(same) == 1 else plain.upper() if len(plain) == 1 else plain

    @property
    def right_options(self) -> frozenset[str]:
        """The letters of the right options. Raises GradingError if the reference names none, or an unknown one."""
        parts = [str(each) for each in self.answer] if isinstance(self.answer, list | tuple) else [str(self.answer)]
        letters = frozenset("".join(self._letters(part) for part in parts))
        unknown = letters - self.by_letter.keys() if self.by_letter else set()
        if not letters or unknown or not all(re.fullmatch("[A-Z]", letter) for letter in letters):
            listed = f"; the options are {', '.join(self.by_letter)}" if self.by_letter else ""
            raise GradingError(f"its answer {self.answer!r:.80} names no option{listed}; give letters such as B or ACD")
        if self.kind == "single" and len(letters) != 1:
            raise GradingError(
                f"its answer {self.answer!r:.80} has {len(letters)} letters; `{self.key_prefix}type` should be multiple"
            )
        return letters

    @property
    def accepted_texts(self) -> list[list[str]]:
        """The synonyms, a list per blank. A single plain list belongs to the only blank."""
        if self.synonyms and all(isinstance(each, str) for each in self.synonyms):
            return [[str(each) for each in self.synonyms]]
        return _as_lists(self.synonyms)

    @property
    def key_points(self) -> list[list[str]]:
        """The alternative wordings of every key point."""
        return _as_lists(self.keywords)

    def weights(self, count: int, what: str) -> list[float]:
        """Return the points of `count` parts.

        Raises GradingError if there is another number of them, or a negative one.
        """
        points = list(self.points) or [1.0] * count
        if len(points) != count or min(points) < 0 or sum(points) <= 0:
            name = f"{self.key_prefix}points"
            raise GradingError(f"`{name}` is {points}; give {count} numbers, one for each of the {what}")
        return points


def _as_lists(texts: Sequence[str | Sequence[str]]) -> list[list[str]]:
    return [[each] if isinstance(each, str) else list(each) for each in texts]
