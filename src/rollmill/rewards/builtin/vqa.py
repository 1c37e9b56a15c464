"""VQA accuracy: agreement with human short answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rollmill.rewards.base import HEDGED, NO_ANSWER, Score
from rollmill.rewards.vision.base import VisionReward, accepted_texts
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill_grading.extraction import FinalAnswer

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_ARTICLES = {"a", "an", "the"}
_FULL_STOP = re.compile(r"\.(?!\d)")
_DIGIT_COMMA = re.compile(r"\d,\d")
_LONGEST = 200
_ENOUGH = 3
"""Annotators who must agree for full credit."""


class VQAReward(VisionReward):
    """VQA accuracy (arXiv:1505.00468): the fraction of annotators who agree, with full credit for three."""

    decides = True
    compares_answers = True
    largest = 1.0
    name: Literal["vqa"]

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the accuracy of an answer (arXiv:1505.00468, 3), from 0 to 1.

        The task's answer is the list of annotators' answers, usually ten. A list of at most three, or a single answer,
        holds accepted answers that are all right. Outcomes besides ok: `no_answer`, `hedged`, `too_long`.
        """
        from rollmill_grading.extraction import answer_section, extract_answer
        from rollmill_grading.phrase import extract_statements, strip_markup

        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        golds = accepted_texts(task.answer)
        text = options.select_answer(completion)
        found = None if text is None else extract_answer(text)
        if text is None or found is None:
            return Score(0.0, NO_ANSWER)
        if found.hedged:
            return Score(0.0, HEDGED)
        is_marked = found.kind in ("boxed", "hash", "said", "corrected")
        part = answer_section(text)
        answers = (
            [strip_markup(found.text), found.value]
            if is_marked
            else [strip_markup(part), *extract_statements(part), *_counted(found)]
        )
        if len(answers[0]) > _LONGEST:
            return Score(0.0, "too_long")
        return Score(max(vqa_accuracy(answer, golds) for answer in answers))


def _counted(found: FinalAnswer) -> list[str]:
    """Return the number in `There are two people`."""
    from rollmill_grading.quantities import normalize_answer, parse_quantity

    amount = (
        parse_quantity(normalize_answer(found.value)) if found.kind == "sentence" and "=" not in found.value else None
    )
    return [] if amount is None or amount.percent else [str(amount.value)]


def vqa_accuracy(answer: str, golds: Sequence[str]) -> float:
    """Return min(agreeing / 3, 1), averaged over leaving out one annotator at a time, as in the official evaluation."""
    normalized = normalize_vqa_answer(answer)
    same = [normalized != "" and normalize_vqa_answer(gold) == normalized for gold in golds]
    if len(golds) <= _ENOUGH:
        return float(any(same))
    agreeing = sum(same)
    return sum(min((agreeing - one) / _ENOUGH, 1.0) for one in same) / len(same)


def normalize_vqa_answer(answer: str) -> str:
    """Apply the official normalisation: lower case, no punctuation, no articles, digits for words up to ten.

    Articles are kept if nothing else is left: `A` may be a letter in the image. The official list adds missing
    apostrophes to contractions; here they are removed from both sides.
    """
    from rollmill_grading.normalization import to_half_width
    from rollmill_grading.numerals import NUMBER_WORDS

    text = lowered = " ".join(to_half_width(answer).split()).lower()
    squeeze = _DIGIT_COMMA.search(lowered) is not None
    for mark in _MARKS:
        if mark in text:
            apart = f"{mark} " in lowered or f" {mark}" in lowered
            text = text.replace(mark, "" if squeeze or apart else " ")
    text = _FULL_STOP.sub("", text).replace("'", "").replace("’", "")
    words = [str(NUMBER_WORDS[word]) if NUMBER_WORDS.get(word, 11) <= 10 else word for word in text.split()]
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)
