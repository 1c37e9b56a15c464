"""The counting reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from rollmill.errors import ConfigError
from rollmill.rewards.base import HEDGED, NO_ANSWER, Score, is_empty_answer
from rollmill.rewards.vision.base import VisionReward
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill_grading.extraction import FinalAnswer

_NONE = re.compile(r"\b(?:no|none|nothing|not any|aren't any|isn't any)\b|没有|无|零", re.IGNORECASE)
_SEVERAL = re.compile(
    r"\b(?:or|to|between|either|maybe|perhaps)\b|或|到|至|可能|也许|还是|\d\s*[-–~]\s*\d", re.IGNORECASE
)
_LONGEST = 400
_NAMED = 3
"""Tasks that an error names."""


class CountReward(VisionReward):
    """1 if the number of the final answer equals the reference, else 0 or, with `credit: relative`, partial credit."""

    decides = True
    compares_answers = True
    largest = 1.0
    name: Literal["count"]
    credit: Literal["exact", "relative"] = "exact"
    """`relative`: 1 - |difference| / reference, at least 0."""

    def check_tasks(self, tasks: Sequence[Task], name: str) -> None:
        """Refuse answers that are no number, such as the letter of an option."""
        wrong: list[str] = []
        for task in self.scored_tasks(tasks, name):
            if task.answer is None or is_empty_answer(task.answer):
                continue
            try:
                reference_count(task.answer)
            except ValueError:
                wrong.append(f"`{task.id}`: {task.answer!r:.40}")
        if wrong:
            named = ", ".join(wrong[:_NAMED]) + (", ..." if len(wrong) > _NAMED else "")
            raise ConfigError(
                f"{len(wrong)} of {len(tasks)} tasks have an answer that is no number of at least 0 ({named}), which "
                f"the reward `{name}` cannot compare with; score them by another reward, in a domain of their own or "
                "named by row (taskset.fields.rewards), or give null where the reward does not apply"
            )

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return 1 if the number of the final answer equals the reference, else 0 or partial credit for a close one.

        Outcomes besides ok: `no_answer` (no number), `hedged` (several).
        """
        from rollmill_grading.extraction import extract_answer
        from rollmill_grading.phrase import names_several_values

        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        gold = reference_count(task.answer)
        text = options.select_answer(completion)
        found = None if text is None else extract_answer(text)
        if found is None:
            return Score(0.0, NO_ANSWER)
        count = parse_count(found)
        if count is None:
            is_vague = found.hedged or _SEVERAL.search(found.value or found.text) is not None
            is_vague = is_vague or (found.kind == "sentence" and names_several_values(found.text))
            return Score(0.0, HEDGED if is_vague else NO_ANSWER)
        if options.credit == "exact":
            return Score(float(count == gold))
        return Score(float(max(Fraction(0), 1 - abs(count - gold) / max(gold, Fraction(1)))))


def parse_count(found: FinalAnswer) -> Fraction | None:
    """Return the number in an answer, in digits or words of both languages; None for none or several."""
    from rollmill_grading.numerals import find_chinese_counts, find_english_numbers
    from rollmill_grading.phrase import names_several_values
    from rollmill_grading.quantities import normalize_answer, parse_quantity, strip_approximation

    text = found.value[:_LONGEST]
    if found.hedged or _SEVERAL.search(text):
        return None
    if found.kind == "sentence" and names_several_values(found.text):
        return None
    number = parse_quantity(strip_approximation(normalize_answer(text.rpartition("=")[2])))
    if number is not None:
        return None if number.percent else number.value
    words = find_english_numbers(text) or find_chinese_counts(text)
    if words:
        return words[-1]
    return Fraction(0) if _NONE.search(text) else None


def reference_count(answer: Any) -> Fraction:
    """Return the number of a task's answer. Raises ValueError if it is none, or below 0."""
    from rollmill.rewards.vision.numbers import parse_chart_number

    found = None if isinstance(answer, bool) else parse_chart_number(str(answer))
    if found is None or found.percent or found.value < 0:
        raise ValueError(f"the task's answer is {answer!r:.80}; the count reward needs a number of at least 0")
    return Fraction(found.value)
