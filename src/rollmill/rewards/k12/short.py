"""Short answers: by a judge with a rubric, or by the key points that a task lists."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollmill.rewards.answers.normalization import fold_text, has_cjk

_MARK = re.compile(r"\bfinal answer\s*:|\banswers?\s*:|(?<![解问回])答\s*:|答案\s*(?:是|为|:)+", re.IGNORECASE)
_NEGATED = re.compile(
    r"(?:\b(?:not|no|never|without|nor|isn't|doesn't|don't|cannot|can't)(?:\s+\w+){0,2}\s+|(?:不是|并非|不|没有|无|非)(?:\w{0,2}))$",
    re.IGNORECASE,
)


def extract_short_answer(text: str) -> str:
    """What a completion gives as its answer: behind `</think>` and behind the last "Answer:", or all of it."""
    text = fold_text(text).rpartition("</think>")[2]
    marks = list(_MARK.finditer(text))
    return (text[marks[-1].end() :] if marks else text).strip()


def key_point_credit(
    answer: str, points: Sequence[Sequence[str]], weights: Sequence[float], wrong: Sequence[str]
) -> float:
    """The share of the key points that an answer has, in one of their wordings and not negated.

    0 where it says something of `wrong`.
    """
    answer = " ".join(answer.casefold().split())
    if any(_says(answer, wording) for wording in wrong):
        return 0.0
    met = [any(_says(answer, wording) for wording in wordings) for wordings in points]
    return sum(weight for weight, is_met in zip(weights, met, strict=True) if is_met) / sum(weights)


def _says(answer: str, wording: str) -> bool:
    wording = " ".join(fold_text(wording).casefold().split())
    pattern = re.escape(wording) if has_cjk(wording) else rf"(?<!\w){re.escape(wording)}(?!\w)"
    return any(not _NEGATED.search(answer[max(0, at.start() - 40) : at.start()]) for at in re.finditer(pattern, answer))
