"""Labelled answers graded by rollmill_grading and by math-verify: right ones rejected, wrong ones accepted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from grading_bench.answer_corpus import Labelled, corpus
from grading_bench.chat_answers import PREFIX, chat_answers
from rollmill_grading import MathGrader, SchoolGrader, SchoolQuestion

BANKS = ("first", "second", "third", "fourth")


def labelled(data: Path) -> list[Labelled]:
    """All answers: to published tasks in four banks of phrasings, and completions as chat models write them.

    The library grades those whose `reward` is `math` or `k12`; the others are about pictures.
    """
    return [*(row for bank in BANKS for row in corpus(data, bank)), *chat_answers()]


def accepted_by_library(rows: Sequence[Labelled], workers: int = 1, time_limit_s: float = 60.0) -> list[bool]:
    """Say for each answer if it earns everything. The rows are `math` or `k12`."""
    math = [row for row in rows if row.reward == "math"]
    school = [row for row in rows if row.reward == "k12"]
    assert len(math) + len(school) == len(rows)
    with MathGrader(workers=workers, time_limit_s=time_limit_s) as grader:
        verdicts = grader.grade_all([row.text for row in math], [row.gold for row in math])
    with SchoolGrader(workers=workers, time_limit_s=time_limit_s) as marker:
        questions = [SchoolQuestion(row.gold, **row.metadata["k12"]) for row in school]
        verdicts += marker.grade_all([row.text for row in school], questions)
    found = {id(row): verdict.correct for row, verdict in zip([*math, *school], verdicts, strict=True)}
    return [found[id(row)] for row in rows]


def accepted_by_math_verify(rows: Sequence[Labelled]) -> list[bool]:
    """Say if math-verify finds each answer equal to its reference; False if it cannot parse one of them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    places = [LatexExtractionConfig(), ExprExtractionConfig()]
    letters = [*places, StringExtractionConfig(strings=tuple("ABCD"), lowercase=False)]
    found = []
    for row in rows:
        configs = letters if _kind(row) in ("k12 single", "math letters") else places
        gold = _reference(row)
        found.append(bool(verify(parse(gold, letters if configs is letters else places), parse(row.text, configs))))
    return found


def counts(rows: Sequence[Labelled], accepted: Sequence[bool]) -> tuple[int, int]:
    """Number of rejected right answers, and of accepted wrong ones."""
    pairs = list(zip(rows, accepted, strict=True))
    return sum(row.right and not taken for row, taken in pairs), sum(taken and not row.right for row, taken in pairs)


def _kind(row: Labelled) -> str:
    return row.group.removeprefix(PREFIX)


def _reference(row: Labelled) -> str:
    if isinstance(row.gold, dict):
        return ", ".join(f"{left}-{right}" for left, right in row.gold.items())
    if isinstance(row.gold, list):
        return "$" + ", ".join(map(str, row.gold)) + "$"
    return str(row.gold) if _kind(row) in ("k12 single", "math letters", "vqa") else f"${row.gold}$"
