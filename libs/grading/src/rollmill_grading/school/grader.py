"""Grades answers to school questions by the rule of the question's type, with partial credit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from rollmill_grading.blocking import PooledGrader, wait_for_verdicts
from rollmill_grading.comparison import EXACT, FLOAT_ROUNDING
from rollmill_grading.complexity import oversize_outcome
from rollmill_grading.errors import GradingError
from rollmill_grading.extraction import FinalAnswer, answer_section, extract_answer
from rollmill_grading.grader_pool import GraderPool
from rollmill_grading.normalization import comparison_key, fold_text, has_cjk
from rollmill_grading.options import is_labelled, selected_options
from rollmill_grading.school.answer_types import (
    count_matched_blanks,
    extract_order,
    extract_pairs,
    extract_short_answer,
    kendall_tau,
    key_point_credit,
    parse_blanks,
    parse_pairs,
    parse_sequence,
    parse_truth_value,
)
from rollmill_grading.school.comparison import ValueMatchOptions, compare_value
from rollmill_grading.school.question import SchoolQuestion
from rollmill_grading.symbolic import compare_answers
from rollmill_grading.verdict import HEDGED, MEMORY, NO_ANSWER, OK, TIMEOUT, UNREADABLE, Text, Verdict, answer_text
from rollmill_grading.worker_process import GraderResult

Readings = tuple[str, str]
"""The text in a blank, and the value in it."""


@dataclass(frozen=True, slots=True)
class MarkingScheme:
    """Rules of partial credit.

    Args:
        multiple: multiple choice. `subset`: a subset of the right options earns partial credit, any wrong option earns
            0 (gaokao); `all`: all or nothing; `per_option`: fraction of the right options chosen minus fraction of the
            wrong ones chosen, at least 0.
        subset_credit: with `subset`, the credit of any proper subset of the right options: 0.4 is the gaokao's rule
            until 2023. Default: the fraction of the right options, its rule since 2024.
        blanks: several blanks: the fraction that is right, or all or nothing.
        ordering: sequences: all or nothing, or Kendall's tau, at least 0.
        matching: pairs: the fraction that is right, or all or nothing.
        tolerance: accepted relative error of numbers, for questions without their own.
        units: whether a number may omit the unit of the reference. A wrong unit is always wrong.
        longest_short_answer: length in characters of a short answer scored by key points; a longer one earns 0.
    """

    multiple: Literal["subset", "all", "per_option"] = "subset"
    subset_credit: float | None = None
    blanks: Literal["share", "all"] = "share"
    ordering: Literal["all", "pairs"] = "all"
    matching: Literal["share", "all"] = "share"
    tolerance: float = 0.0
    units: Literal["optional", "required"] = "optional"
    longest_short_answer: int = 600

    def multiple_choice_credit(self, right: frozenset[str], named: frozenset[str], options: int) -> float:
        """Return the credit of the named options: 1 for exactly the right ones, else by the rule `multiple`.

        Args:
            options: how many there are; 0 if that is unknown.
        """
        if named == right:
            return 1.0
        if self.multiple == "all":
            return 0.0
        if self.multiple == "subset":
            share = len(named) / len(right) if self.subset_credit is None else self.subset_credit
            return share if named < right else 0.0
        wrong = options - len(right) if options else 0
        missed = len(named - right) / wrong if wrong else float(bool(named - right))
        return max(0.0, len(named & right) / len(right) - missed)


class SchoolGrader(PooledGrader):
    """Grades school questions: a score from 0 to 1 by the rule of the question's type.

    The outcome is `unreadable` for an answer that does not fit the type, or contradicts itself. Arguments besides
    `scheme`: those of `PooledGrader`.
    """

    def __init__(
        self,
        scheme: MarkingScheme | None = None,
        pool: GraderPool | None = None,
        *,
        workers: int = 1,
        time_limit_s: float = 60.0,
    ) -> None:
        super().__init__(pool, workers=workers, time_limit_s=time_limit_s)
        self.scheme = scheme or MarkingScheme()

    def grade(self, completion: Text, question: SchoolQuestion) -> Verdict:
        """Grade one completion, whose reasoning does not count. Raises like `grade_async`."""
        return self.grade_all([completion], [question])[0]

    def grade_all(self, completions: Sequence[Text], questions: Sequence[SchoolQuestion]) -> list[Verdict]:
        """Grade completions, each by its question, with all processes at once. Raises like `grade_async`."""
        texts = [answer_text(each) for each in completions]
        return wait_for_verdicts(
            [
                Verdict(0.0, NO_ANSWER) if text is None else self.grade_async(text, question)
                for text, question in zip(texts, questions, strict=True)
            ]
        )

    async def grade_async(self, text: str, question: SchoolQuestion) -> Verdict:
        """Grade a text without reasoning. Never raises because of the text.

        Raises GradingError if the question's reference cannot be used, or needs a judge; MissingPintError if a unit
        has to be converted without pint.
        """
        if question.kind == "short":
            return self._short(question, text)
        several = isinstance(question.answer, list | tuple) and len(question.answer) > 1
        found = _extract_folded(text, values=question.kind in ("blank", "numeric") and not several)
        if found is not None and found.hedged:
            return Verdict(0.0, HEDGED)
        if found is not None and (outcome := oversize_outcome(found.text)) is not None:
            return Verdict(0.0, outcome)
        match question.kind:
            case "single" | "multiple":
                return await self._choice(question, question.right_options, found)
            case "true_false":
                return _true_false(question, found)
            case "ordering":
                return self._ordering(question, found)
            case "matching":
                return self._matching(question, found)
            case _:
                return await self._blanks(
                    question, found, fold_text(answer_section(text)).rstrip().rpartition("\n\n")[2][-2000:]
                )

    async def _choice(self, question: SchoolQuestion, right: frozenset[str], found: FinalAnswer | None) -> Verdict:
        if found is None:
            return Verdict(0.0, NO_ANSWER)
        named = selected_options(found, question.by_letter, several=question.kind == "multiple")
        if named is None and question.kind == "single" and found.marked and question.by_letter:
            return await self._as_option(question, next(iter(right)), found.text)
        if named is None:
            return Verdict(0.0, UNREADABLE)
        if question.kind == "single":
            return Verdict(float(named == right), OK if len(named) == 1 else UNREADABLE)
        return Verdict(self.scheme.multiple_choice_credit(right, named, len(question.by_letter)))

    async def _as_option(self, question: SchoolQuestion, letter: str, text: str) -> Verdict:
        """Grade an answer without a letter, which may be the right option's formula in another form."""
        option = fold_text(question.by_letter[letter])
        if is_labelled(text, question.by_letter):
            return Verdict(0.0, UNREADABLE)
        twins = [name for name, other in question.by_letter.items() if comparison_key(other) == comparison_key(option)]
        if comparison_key(text) == comparison_key(option) or (
            len(twins) == 1 and not has_cjk(text) and len(text) <= 200
        ):
            return _verdict_of(await compare_answers(option, text, EXACT, self.pool, self.time_limit_s))
        return Verdict(0.0, UNREADABLE)

    async def _blanks(self, question: SchoolQuestion, found: FinalAnswer | None, paragraph: str) -> Verdict:
        golds = _golds(question)
        count = len(golds)
        weights = question.weights(count, "blanks")
        synonyms = question.accepted_texts or [[]] * count
        prefix = question.key_prefix
        if len(synonyms) != count:
            raise GradingError(
                f"`{prefix}synonyms` has {len(synonyms)} lists for {count} blanks; give one list for each"
            )
        if question.unordered and question.points:
            raise GradingError(f"`{prefix}points` cannot go with `{prefix}unordered`; leave out one of them")
        if found is None:
            return Verdict(0.0, NO_ANSWER)
        texts = [(found.text, found.value)] if count == 1 else parse_blanks(found, paragraph, count)
        if texts is None:
            return Verdict(0.0, UNREADABLE)
        if question.unordered and count > 1:
            rows = await asyncio.gather(
                *(
                    self._compare_all(question, gold, accepted, texts)
                    for gold, accepted in zip(golds, synonyms, strict=True)
                )
            )
            replies = [reply for row in rows for reply in row]
            share = count_matched_blanks([[reply.value == 1.0 for reply in row] for row in rows]) / count
        else:
            cells = zip(golds, synonyms, texts, strict=False)
            rows = await asyncio.gather(
                *(self._compare_all(question, gold, accepted, [text]) for gold, accepted, text in cells)
            )
            replies = [row[0] for row in rows]
            earned = sum(weight for weight, reply in zip(weights, replies, strict=False) if reply.value == 1.0)
            share = earned / sum(weights)
        ended = next((reply for reply in replies if reply.outcome in (TIMEOUT, MEMORY)), None)
        queue_s = max((reply.queue_s for reply in replies), default=0.0)
        if ended is not None and share < 1:
            return Verdict(0.0, ended.outcome, queue_s)
        outcome = replies[0].outcome if count == 1 else OK
        return Verdict(share if self.scheme.blanks == "share" else float(share == 1), outcome, queue_s)

    async def _compare_all(
        self, question: SchoolQuestion, gold: str, accepted: list[str], texts: list[Readings]
    ) -> list[GraderResult]:
        """Return whether each of the texts may fill one blank."""
        tolerance = self.scheme.tolerance if question.tolerance is None else question.tolerance
        rounding = FLOAT_ROUNDING if isinstance(question.answer, float) else Fraction(0)
        options = ValueMatchOptions(
            self.pool,
            self.time_limit_s,
            max(Fraction(str(tolerance)), rounding),
            Fraction(str(question.absolute_tolerance)),
            self.scheme.units == "required",
        )
        replies = []
        for text, value in texts:
            if any(comparison_key(word) in (comparison_key(text), comparison_key(value)) for word in accepted):
                replies.append(GraderResult(OK, 1.0))
            else:
                replies.append(await compare_value(gold, text, value, question, options))
        return replies

    def _ordering(self, question: SchoolQuestion, found: FinalAnswer | None) -> Verdict:
        gold = parse_sequence(question.answer)
        if found is None:
            return Verdict(0.0, NO_ANSWER)
        answer = extract_order(found, gold, question.by_letter)
        if answer is None:
            return Verdict(0.0, UNREADABLE)
        tau = kendall_tau(gold, answer)
        return Verdict(float(tau == 1) if self.scheme.ordering == "all" else max(0.0, tau))

    def _matching(self, question: SchoolQuestion, found: FinalAnswer | None) -> Verdict:
        gold = parse_pairs(question.answer)
        weights = question.weights(len(gold), "pairs")
        if found is None:
            return Verdict(0.0, NO_ANSWER)
        given = extract_pairs(found, gold)
        right = sum(weight for weight, (left, to) in zip(weights, gold.items(), strict=True) if given.get(left) == to)
        share = right / sum(weights)
        return Verdict(share if self.scheme.matching == "share" else float(share == 1), OK if given else UNREADABLE)

    def _short(self, question: SchoolQuestion, text: str) -> Verdict:
        if not question.keywords:
            keywords = f"{question.key_prefix}keywords"
            raise GradingError(f"it is a short answer; list its key points in `{keywords}`, or let a model judge it")
        answer = extract_short_answer(text)
        weights = question.weights(len(question.keywords), "key points")
        if len(answer) > self.scheme.longest_short_answer:
            return Verdict(0.0, "too_long")
        return Verdict(key_point_credit(answer, question.key_points, weights, question.wrong))


def _verdict_of(reply: GraderResult) -> Verdict:
    return Verdict(float(reply.value), reply.outcome, reply.queue_s, reply.run_s)


def _extract_folded(text: str, *, values: bool) -> FinalAnswer | None:
    """Extract the final answer, without bold marks and with circled digits as one character."""
    found = extract_answer(text, values=values)
    if found is None:
        return None
    boxes = tuple(fold_text(each) for each in found.boxes)
    return replace(
        found,
        text=fold_text(found.text).strip(),
        value=fold_text(found.value),
        tail=fold_text(found.tail).strip(),
        boxes=boxes,
    )


def _golds(question: SchoolQuestion) -> list[str]:
    """Return the reference of every blank. Raises GradingError if one is neither text nor a number."""
    given = question.answer if isinstance(question.answer, list | tuple) else [question.answer]
    for each in given:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise GradingError(f"its answer has {each!r:.80} ({type(each).__name__}); a blank needs text or a number")
        if not str(each).strip():
            raise GradingError("its answer has an empty blank; give what belongs there, or leave the task out")
    if not given:
        raise GradingError("its answer is an empty list; give one entry for each blank")
    return [fold_text(str(each)) for each in given]


def _true_false(question: SchoolQuestion, found: FinalAnswer | None) -> Verdict:
    gold = question.answer if isinstance(question.answer, bool) else parse_truth_value(fold_text(str(question.answer)))
    if gold is None:
        raise GradingError(f"its answer {question.answer!r:.80} is neither true nor false; give true or false")
    if found is None:
        return Verdict(0.0, NO_ANSWER)
    given = parse_truth_value(found.text)
    return Verdict(float(given is gold), UNREADABLE if given is None else OK)
