"""VQA accuracy: agreement with people's short answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.config.rewards import VQAReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.answers.final import FinalAnswer, answer_part, final_answer
from rollmill.rewards.answers.numerals import NUMBER_WORDS
from rollmill.rewards.answers.phrase import tidy
from rollmill.rewards.answers.statement import stated
from rollmill.rewards.answers.writing import half_width
from rollmill.rewards.base import HEDGED, NO_ANSWER, Verdict
from rollmill.rewards.numbers import normalised as normal
from rollmill.rewards.numbers import quantity
from rollmill.rewards.text.reading import judged_part
from rollmill.rewards.vision.ocr import references

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = {"a", "an", "the"}
_FULL_STOP = re.compile(r"\.(?!\d)")
_DIGIT_COMMA = re.compile(r"\d,\d")
_LONGEST = 200
_ENOUGH = 3
"""People who have to agree for full credit."""


class VQA:
    """Accuracy of an answer (arXiv:1505.00468, 3): from 0 to 1. Outcomes besides ok: `no_answer`, `hedged`,
    `too_long`.

    The task's answer is the list of people's answers, usually ten. A list of at most three, or a single answer, is one
    of answers that are all right.
    """

    def __init__(self, config: VQAReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Verdict(None)
        golds = references(task.answer)
        text = judged_part(completion.text, config)
        found = None if text is None else final_answer(text)
        if text is None or found is None:
            return Verdict(0.0, NO_ANSWER)
        if found.hedged:
            return Verdict(0.0, HEDGED)
        is_said = found.kind in ("boxed", "hash", "said", "corrected")
        part = answer_part(text)
        answers = [tidy(found.text), found.value] if is_said else [tidy(part), *stated(part), *_counted(found)]
        if len(answers[0]) > _LONGEST:
            return Verdict(0.0, "too_long")
        return Verdict(max(accuracy(answer, golds) for answer in answers))


def _counted(found: FinalAnswer) -> list[str]:
    """The number of `There are two people`."""
    amount = quantity(normal(found.value)) if found.kind == "sentence" and "=" not in found.value else None
    return [] if amount is None or amount.percent else [str(amount.value)]


def accuracy(answer: str, golds: Sequence[str]) -> float:
    """min(agreeing / 3, 1), averaged over leaving out one person at a time, as in the official evaluation."""
    said = normalised(answer)
    same = [said != "" and normalised(gold) == said for gold in golds]
    if len(golds) <= _ENOUGH:
        return float(any(same))
    agreeing = sum(same)
    return sum(min((agreeing - one) / _ENOUGH, 1.0) for one in same) / len(same)


def normalised(answer: str) -> str:
    """The official normalisation: lower case, no punctuation, no articles, digits for words up to ten.

    Where nothing but articles would be left out, they stay: `A` may be the letter that a picture shows.
    The official list puts missing apostrophes into contractions; here they are taken out of both sides.
    """
    text = said = " ".join(half_width(answer).split()).lower()
    squeeze = _DIGIT_COMMA.search(said) is not None
    for mark in _MARKS:
        if mark in text:
            apart = f"{mark} " in said or f" {mark}" in said
            text = text.replace(mark, "" if squeeze or apart else " ")
    text = _FULL_STOP.sub("", text).replace("'", "").replace("’", "")
    words = [str(NUMBER_WORDS[word]) if NUMBER_WORDS.get(word, 11) <= 10 else word for word in text.split()]
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)
