r"""Grades answers to mathematical questions: numbers, units, formulas, sets, intervals, equations, options, words.

Texts and numbers are compared here, and formulas with math-verify in a grader process, limited by its steps, so that no
verdict depends on the load of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from rollmill_grading.blocking import PooledGrader, wait_for_verdicts
from rollmill_grading.comparison import (
    FLOAT_ROUNDING,
    AnswerMatchOptions,
    compare_texts,
    is_equation_side,
    is_plain_words,
    option_texts,
    parse_option_letter,
    split_option,
)
from rollmill_grading.complexity import TOO_COSTLY, oversize_outcome
from rollmill_grading.errors import GradingError
from rollmill_grading.extraction import AnswerExtraction, FinalAnswer, extract_answer, extract_reference
from rollmill_grading.options import selected_options
from rollmill_grading.quantities import normalize_answer, strip_spaces
from rollmill_grading.symbolic import start_comparison
from rollmill_grading.verdict import HEDGED, NO_ANSWER, OK, Text, Verdict, answer_text, last_text
from rollmill_grading.worker_process import GraderResult

_LETTER_FORMULA = re.compile(
    r"\$\W*[A-Za-z]\W*\$|\\\(\W*[A-Za-z]\W*\\\)|\\(?:text|textbf|mathrm|mbox)\s*\{[A-Za-z .'-]{1,60}\}"
)

Options = Mapping[str, Any] | Sequence[Any] | None
Units = Literal["optional", "required"]


class MathGrader(PooledGrader):
    r"""Grades final answers: 1 if the answer equals the reference, else 0.

    The arguments of all methods:
        reference: text or a number; of a worked solution, its last \boxed{} or the text after `####`.
        question: an answer `x^2 + y^2 = 25` is 25 if the question asks for its left side.
        options: the texts of the options, by letter or in order.
        extract: where the answer is: `boxed`, `hash` (after `####`), `last_number`; `auto` takes the best evidence.
        tolerance: accepted relative error of numbers. At 0, 0.3333 is not 1/3.
        units: whether an answer may omit the unit or percent sign of the reference. A wrong unit is always wrong.
    """

    def grade(
        self,
        completion: Text,
        reference: str | float,
        *,
        question: Text = "",
        options: Options = None,
        extract: AnswerExtraction = "auto",
        tolerance: float = 0.0,
        units: Units = "optional",
    ) -> Verdict:
        """Grade one completion, whose reasoning does not count. Raises GradingError if the reference is empty."""
        text = answer_text(completion)
        if text is None:
            return Verdict(0.0, NO_ANSWER)
        begun = self.begin(
            text, reference, question=question, options=options, extract=extract, tolerance=tolerance, units=units
        )
        return wait_for_verdicts([begun])[0]

    def grade_all(
        self,
        completions: Sequence[Text],
        references: Sequence[str | float],
        *,
        questions: Sequence[Text] | None = None,
        options: Sequence[Options] | None = None,
        extract: AnswerExtraction = "auto",
        tolerance: float = 0.0,
        units: Units = "optional",
    ) -> list[Verdict]:
        """Grade completions, each by its reference, with all processes at once. Raises like `grade`."""
        count = len(completions)
        rows = zip(completions, references, questions or [""] * count, options or [None] * count, strict=True)
        begun: list[Verdict | Awaitable[Verdict]] = []
        for completion, reference, question, choices in rows:
            text = answer_text(completion)
            keys: dict[str, Any] = {"extract": extract, "tolerance": tolerance, "units": units}
            begun.append(
                Verdict(0.0, NO_ANSWER)
                if text is None
                else self.begin(text, reference, question=question, options=choices, **keys)
            )
        return wait_for_verdicts(begun)

    def begin(
        self,
        text: str,
        reference: str | float,
        *,
        question: Text = "",
        options: Options = None,
        extract: AnswerExtraction = "auto",
        tolerance: float = 0.0,
        units: Units = "optional",
    ) -> Verdict | Awaitable[Verdict]:
        """Grade a text without reasoning, for callers with an event loop. Never raises because of the text.

        Returns the verdict if no algebra is needed, which is quick; else what to await. The first formula is with a
        grader process when this returns, however busy the event loop is.
        """
        gold = reference_text(reference)
        plain = normalize_answer(gold)
        in_words = parse_option_letter(plain) is not None or is_plain_words(plain)
        found = extract_answer(text, extract, values=not in_words)
        if in_words and (found is None or found.kind == "line"):
            found = _formula_answer(text) or found
        if found is None or not (answer := found.text if in_words else found.value):
            return Verdict(0.0, NO_ANSWER)
        if found.hedged:
            return Verdict(0.0, HEDGED)
        if strip_spaces(plain) in (strip_spaces(normalize_answer(answer)), strip_spaces(normalize_answer(found.text))):
            return Verdict(1.0)
        if (outcome := oversize_outcome(answer)) is not None:
            return Verdict(0.0, outcome)
        slack = max(Fraction(tolerance), FLOAT_ROUNDING if isinstance(reference, float) else Fraction(0))
        rules = AnswerMatchOptions(slack, units_required=units == "required")
        choices = option_texts(options)
        answer = _extract_words(plain, found, choices) if in_words else _without_asked_side(answer, question)
        decision = compare_texts(*_resolve_options(gold, answer, choices, rules), rules)
        if isinstance(decision, bool):
            return Verdict(float(decision))
        return _verdict_of(start_comparison(decision, rules, self.pool, self.time_limit_s))


async def _verdict_of(comparison: Awaitable[GraderResult]) -> Verdict:
    reply = await comparison
    if reply.outcome == TOO_COSTLY:
        return Verdict(0.0, TOO_COSTLY)
    return Verdict(float(reply.value) if reply.outcome == OK else 0.0, reply.outcome, reply.queue_s, reply.run_s)


def reference_text(reference: object) -> str:
    r"""Return the reference as text; of a worked solution only its last \boxed{} or the text after "####".

    Raises GradingError if it is neither text nor a number, or empty.
    """
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        kind = type(reference).__name__
        raise GradingError(f"the reference is {reference!r:.80} ({kind}); give text or a number")
    text = str(reference)
    if not text.strip():
        raise GradingError("the reference is empty; give the answer, or leave the question out")
    return extract_reference(text)


def _formula_answer(text: str) -> FinalAnswer | None:
    """Return the answer if the last sentence gives a letter or words as a formula: `so we get $D$`, `$\\text{red}$`."""
    found = extract_answer(text)
    return found if found is not None and _LETTER_FORMULA.fullmatch(found.value) else None


def _without_asked_side(answer: str, question: Text) -> str:
    """Return the value of `x^2 + y^2 = 25` if the question asks for x^2 + y^2; other answers unchanged."""
    side, _, value = normalize_answer(answer).partition("=")
    if not value or "=" in value or not is_equation_side(side):
        return answer
    asked = re.compile(rf"{re.escape(strip_spaces(side))}(?![\^=<>≤≥]|\\[lg]e)")
    return value.strip() if asked.search(strip_spaces(normalize_answer(last_text(question)))) else answer


def _extract_words(gold: str, found: FinalAnswer, options: dict[str, str]) -> str:
    """Return the letter or the words that an answer to a question with such a reference names."""
    if parse_option_letter(gold) is None:
        return found.value
    if parse_option_letter(normalize_answer(found.value)) is not None:
        return found.value
    letters = selected_options(found, options, several=False)
    if letters is None or split_option(normalize_answer(found.text)) is not None:
        return found.text
    return "".join(sorted(letters))


def _resolve_options(gold: str, answer: str, options: dict[str, str], rules: AnswerMatchOptions) -> tuple[str, str]:
    """Return the reference and the answer to compare if the options are known: letters, or option texts.

    A letter stands for its option, and the text of an option for its letter. A letter with the text of another option
    is compared as that other option.
    """
    letter, choice = parse_option_letter(normalize_answer(gold)), split_option(normalize_answer(answer))
    text = normalize_answer(answer) if choice is None else choice[1]
    exact = replace(rules, slack=Fraction(0))
    if letter in options:
        matching = [name for name, option in options.items() if text and compare_texts(option, text, exact) is True]
        return gold, (matching[0] if len(matching) == 1 else answer)
    if options and choice is not None and not choice[1]:
        return gold, options.get(choice[0], answer)
    return gold, answer
