"""The counting reward."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from rollmill.config.rewards import CountReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.answers.final import FinalAnswer, final_answer
from rollmill.rewards.answers.numerals import counted_in_chinese, spoken
from rollmill.rewards.answers.phrase import several
from rollmill.rewards.base import HEDGED, NO_ANSWER, Verdict
from rollmill.rewards.numbers import normalised, quantity
from rollmill.rewards.text.reading import judged_part
from rollmill.rewards.vision.figures import figure

_NONE = re.compile(r"\b(?:no|none|nothing|not any|aren't any|isn't any)\b|没有|无|零", re.IGNORECASE)
_SEVERAL = re.compile(
    r"\b(?:or|to|between|either|maybe|perhaps)\b|或|到|至|可能|也许|还是|\d\s*[-–~]\s*\d", re.IGNORECASE
)
_LONGEST = 400


class Count:
    """1 if the number of the final answer is the reference, else 0 or credit for being near.

    Outcomes besides ok: `no_answer` (no number), `hedged` (several).
    """

    def __init__(self, config: CountReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Verdict(None)
        gold = _reference(task.answer)
        text = judged_part(completion.text, config)
        found = None if text is None else final_answer(text)
        if found is None:
            return Verdict(0.0, NO_ANSWER)
        count = counted(found)
        if count is None:
            is_vague = found.hedged or _SEVERAL.search(found.value or found.text) is not None
            is_vague = is_vague or (found.kind == "sentence" and several(found.text))
            return Verdict(0.0, HEDGED if is_vague else NO_ANSWER)
        if config.credit == "exact":
            return Verdict(float(count == gold))
        return Verdict(float(max(Fraction(0), 1 - abs(count - gold) / max(gold, Fraction(1)))))


def counted(found: FinalAnswer) -> Fraction | None:
    """The number that an answer names, in digits or words of both languages; None for none or several."""
    text = found.value[:_LONGEST]
    if found.hedged or _SEVERAL.search(text):
        return None
    if found.kind == "sentence" and several(found.text):
        return None
    number = quantity(normalised(text.rpartition("=")[2]))
    if number is not None:
        return None if number.percent else number.value
    words = spoken(text) or counted_in_chinese(text)
    if words:
        return words[-1]
    return Fraction(0) if _NONE.search(text) else None


def _reference(answer: Any) -> Fraction:
    found = None if isinstance(answer, bool) else figure(str(answer))
    if found is None or found.percent or found.value < 0:
        raise ValueError(f"the task's answer is {answer!r:.80}; the count reward needs a number of at least 0")
    return Fraction(found.value)
