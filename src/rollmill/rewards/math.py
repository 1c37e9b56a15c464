"""The math reward: extracts the final answer, compares texts and numbers here, and formulas with math-verify.

Algebra runs in a grader process and is limited by its steps, so that no verdict depends on the load of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import replace
from fractions import Fraction

from rollmill.config.rewards.math import MathReward
from rollmill.rewards.answers.comparison import (
    AnswerMatchOptions,
    compare_texts,
    is_equation_side,
    is_plain_words,
    parse_option_letter,
    split_option,
    task_options,
)
from rollmill.rewards.answers.complexity import oversize_outcome
from rollmill.rewards.answers.extraction import FinalAnswer, extract_answer, extract_reference
from rollmill.rewards.answers.options import selected_options as chosen_letters
from rollmill.rewards.answers.quantities import normalize_answer, strip_spaces
from rollmill.rewards.answers.symbolic import start_comparison
from rollmill.rewards.base import HEDGED, NO_ANSWER, OK, Score, find_answer
from rollmill.rewards.grader_pool import GraderResult
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task

_ROUNDING = Fraction(1, 10**9)
"""Relative difference allowed if the reference is a Python float."""

_LETTER_FORMULA = re.compile(
    r"\$\W*[A-Za-z]\W*\$|\\\(\W*[A-Za-z]\W*\\\)|\\(?:text|textbf|mathrm|mbox)\s*\{[A-Za-z .'-]{1,60}\}"
)


class MathScorer:
    """1 if the final answer equals the reference, else 0. A task without an answer has no reward.

    A task's column `math` may override `extract`, `tolerance` and `units`. Its column `options` or `choices` maps
    option letters to their texts. Outcomes besides ok: `no_answer`, `hedged`, `too_long`, `too_deep`, `too_costly`,
    `timeout`, `memory`.
    """

    def __init__(self, config: MathReward, resources: RewardResources) -> None:
        self._config, self._graders = config, resources.graders_for("math")

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        found = self._answer_of(task, completion)
        if isinstance(found, Score):
            return found
        decision = compare_texts(*found)
        if isinstance(decision, bool):
            return Score(float(decision))
        return self._score_of(start_comparison(decision, found[2], self._graders, self._config.time_limit_s))

    async def score(self, task: Task, completion: Completion) -> Score:
        begun = self.begin(task, completion)
        return begun if isinstance(begun, Score) else await begun

    def _answer_of(self, task: Task, completion: Completion) -> Score | tuple[str, str, AnswerMatchOptions]:
        """Return the score if the answer need not be compared; else the reference, the answer, and how to compare."""
        if task.answer is None:
            return Score(None)
        gold, config = reference_answer(task.answer), self._config.of_task(task.taskset, task.metadata)
        plain = normalize_answer(gold)
        in_words = parse_option_letter(plain) is not None or is_plain_words(plain)
        if (text := find_answer(completion)) is None:
            return Score(0.0, NO_ANSWER)
        found = extract_answer(text, config.extract, values=not in_words)
        if in_words and (found is None or found.kind == "line"):
            found = _formula_answer(text) or found
        if found is None or not (answer := found.text if in_words else found.value):
            return Score(0.0, NO_ANSWER)
        if found.hedged:
            return Score(0.0, HEDGED)
        if strip_spaces(plain) in (strip_spaces(normalize_answer(answer)), strip_spaces(normalize_answer(found.text))):
            return Score(1.0)
        if (outcome := oversize_outcome(answer)) is not None:
            return Score(0.0, outcome)
        slack = max(Fraction(config.tolerance), _ROUNDING if isinstance(task.answer, float) else Fraction(0))
        rules = AnswerMatchOptions(slack, units_required=config.units == "required")
        options = task_options(task.metadata)
        answer = _extract_words(plain, found, options) if in_words else _without_asked_side(answer, task)
        return *_resolve_options(gold, answer, options, rules), rules

    async def _score_of(self, comparison: Awaitable[GraderResult]) -> Score:
        reply = await comparison
        if reply.outcome == "too_costly":
            return Score(0.0, reply.outcome)
        if reply.outcome != OK:
            return Score(self._config.timeout_reward, reply.outcome, reply.queue_s, reply.run_s)
        return Score(float(reply.value), OK, reply.queue_s, reply.run_s)


def reference_answer(answer: object) -> str:
    """Return the reference as text; of a worked solution only its last \\boxed{} or the text after "####".

    Raises TypeError if it is neither text nor a number, ValueError if it is empty.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise TypeError(f"the task's answer is {answer!r:.80} ({kind}); the math reward needs text or a number")
    text = str(answer)
    if not text.strip():
        raise ValueError("the task's answer is empty; give one, or null where the math reward does not apply")
    return extract_reference(text)


def _formula_answer(text: str) -> FinalAnswer | None:
    """Return the answer if the last sentence gives a letter or words as a formula: `so we get $D$`, `$\\text{red}$`."""
    found = extract_answer(text)
    return found if found is not None and _LETTER_FORMULA.fullmatch(found.value) else None


def _without_asked_side(answer: str, task: Task) -> str:
    """Return the value of `x^2 + y^2 = 25` if the question asks for x^2 + y^2; other answers unchanged."""
    side, _, value = normalize_answer(answer).partition("=")
    if not value or "=" in value or not is_equation_side(side):
        return answer
    prompt = task.prompt if isinstance(task.prompt, str) else str(task.prompt[-1]["content"])
    asked = re.compile(rf"{re.escape(strip_spaces(side))}(?![\^=<>≤≥]|\\[lg]e)")
    return value.strip() if asked.search(strip_spaces(normalize_answer(prompt))) else answer


def _extract_words(gold: str, found: FinalAnswer, options: dict[str, str]) -> str:
    """Return the letter or the words that an answer to a question with such a reference names."""
    if parse_option_letter(gold) is None:
        return found.value
    if parse_option_letter(normalize_answer(found.value)) is not None:
        return found.value
    letters = chosen_letters(found, options, several=False)
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
