"""Final answers of language models: find, normalise, compare.

Mathematics, options, quantities with units and school questions, in English and Chinese.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill_grading.errors import GradingError as GradingError
    from rollmill_grading.extraction import FinalAnswer as FinalAnswer
    from rollmill_grading.extraction import extract_answer as extract_answer
    from rollmill_grading.math_grader import MathGrader as MathGrader
    from rollmill_grading.school.grader import MarkingScheme as MarkingScheme
    from rollmill_grading.school.grader import SchoolGrader as SchoolGrader
    from rollmill_grading.school.question import SchoolQuestion as SchoolQuestion
    from rollmill_grading.verdict import Verdict as Verdict
    from rollmill_grading.verdict import answer_text as answer_text

_HOMES = {
    "FinalAnswer": "extraction",
    "GradingError": "errors",
    "MarkingScheme": "school.grader",
    "MathGrader": "math_grader",
    "SchoolGrader": "school.grader",
    "SchoolQuestion": "school.question",
    "Verdict": "verdict",
    "answer_text": "verdict",
    "extract_answer": "extraction",
}


def __getattr__(name: str) -> Any:
    """Import the names on first use: worker processes of other kinds use none of them, and start sooner."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rollmill_grading' has no attribute '{name}'")
    return getattr(import_module(f"rollmill_grading.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
