"""The K-12 reward: parses the question, extracts the answer, and scores it by the rule of the question's type."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from rollmill.config.rewards.k12 import K12Reward
from rollmill.errors import RewardError
from rollmill.rewards.answers.comparison import EXACT
from rollmill.rewards.answers.complexity import oversize_outcome
from rollmill.rewards.answers.extraction import FinalAnswer, answer_section, extract_answer
from rollmill.rewards.answers.normalization import comparison_key, fold_text, has_cjk
from rollmill.rewards.answers.options import is_labelled, selected_options
from rollmill.rewards.answers.symbolic import compare_answers
from rollmill.rewards.base import HEDGED, NO_ANSWER, OK, TIMEOUT, Score, find_answer
from rollmill.rewards.grader_pool import GraderResult
from rollmill.rewards.k12.answer_types import (
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
from rollmill.rewards.k12.comparison import ValueMatchOptions, compare_value
from rollmill.rewards.k12.question import K12Question, correct_options, read_question
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.judges.generative import RubricJudge

_ROUNDING = Fraction(1, 10**9)
"""Relative difference allowed if the reference is a Python float."""


Readings = tuple[str, str]
"""The text in a blank, and the value in it."""


class K12Scorer:
    """A score from 0 to 1 by the rule of the question's type; None if the task has no answer.

    `details` has the same number under the task's subject and `grade-N`. Outcomes besides ok: `no_answer`, `unreadable`
    (an answer that does not fit its type or contradicts itself), `hedged`, `too_long`, `too_deep`, `too_costly`,
    `timeout`, `memory`.
    """

    def __init__(self, config: K12Reward, resources: RewardResources) -> None:
        self._config, self._graders = config, resources.graders_for("math")
        self._judge_model: RubricJudge | None = None
        if config.judge is not None:
            from rollmill.rewards.judges.generative import RubricJudge

            self._judge_model = RubricJudge(config.judge, resources)

    def counters(self) -> dict[str, float]:
        """Return the counters of the judge of short answers."""
        return {} if self._judge_model is None else self._judge_model.counters()

    async def score(self, task: Task, completion: Completion) -> Score:
        question = read_question(task)
        if question is None:
            return Score(None)
        text = find_answer(completion)
        score = Score(0.0, NO_ANSWER) if text is None else await self._score(task, question, text)
        assert isinstance(score.value, float)
        return replace(score, details=_details(question, score.value))

    async def _score(self, task: Task, question: K12Question, text: str) -> Score:
        if question.kind == "short":
            return await self._short(task, question, text)
        several = isinstance(question.answer, list | tuple) and len(question.answer) > 1
        found = _extract_folded(text, values=question.kind in ("blank", "numeric") and not several)
        if found is not None and found.hedged:
            return Score(0.0, HEDGED)
        if found is not None and (outcome := oversize_outcome(found.text)) is not None:
            return Score(0.0, outcome)
        match question.kind:
            case "single" | "multiple":
                return await self._choice(question, correct_options(question), found)
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

    async def _choice(self, question: K12Question, right: frozenset[str], found: FinalAnswer | None) -> Score:
        if found is None:
            return Score(0.0, NO_ANSWER)
        named = selected_options(found, question.options, several=question.kind == "multiple")
        if named is None and question.kind == "single" and found.marked and question.options:
            return await self._as_option(question, next(iter(right)), found.text)
        if named is None:
            return Score(0.0, "unreadable")
        if question.kind == "single":
            return Score(float(named == right), OK if len(named) == 1 else "unreadable")
        return Score(multiple_choice_credit(right, named, question.options, self._config))

    async def _as_option(self, question: K12Question, letter: str, text: str) -> Score:
        """Score an answer without a letter, which may be the right option's formula in another form."""
        option = fold_text(question.options[letter])
        if is_labelled(text, question.options):
            return Score(0.0, "unreadable")
        twins = [name for name, other in question.options.items() if comparison_key(other) == comparison_key(option)]
        if comparison_key(text) == comparison_key(option) or (
            len(twins) == 1 and not has_cjk(text) and len(text) <= 200
        ):
            return self._from_reply(
                await compare_answers(option, text, EXACT, self._graders, self._config.time_limit_s)
            )
        return Score(0.0, "unreadable")

    async def _blanks(self, question: K12Question, found: FinalAnswer | None, paragraph: str) -> Score:
        golds = _golds(question)
        count = len(golds)
        points = question.points(count, "blanks")
        synonyms = question.synonyms or [[]] * count
        if len(synonyms) != count:
            raise RewardError(f"`k12.synonyms` has {len(synonyms)} lists for {count} blanks; give one list for each")
        if question.column.unordered and question.column.points:
            raise RewardError("`k12.points` cannot go with `k12.unordered`; leave out one of them")
        if found is None:
            return Score(0.0, NO_ANSWER)
        texts = [(found.text, found.value)] if count == 1 else parse_blanks(found, paragraph, count)
        if texts is None:
            return Score(0.0, "unreadable")
        if question.column.unordered and count > 1:
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
            share = sum(weight for weight, reply in zip(points, replies, strict=False) if reply.value == 1.0) / sum(
                points
            )
        slow = next((reply for reply in replies if reply.outcome in (TIMEOUT, "memory")), None)
        queue_s = max((reply.queue_s for reply in replies), default=0.0)
        if slow is not None and share < 1:
            return self._from_reply(GraderResult(slow.outcome, 0.0, queue_s))
        outcome = replies[0].outcome if count == 1 else OK
        return Score(share if self._config.blanks == "share" else float(share == 1), outcome, queue_s)

    async def _compare_all(
        self, question: K12Question, gold: str, accepted: list[str], texts: list[Readings]
    ) -> list[GraderResult]:
        """Return whether each of the texts may fill one blank."""
        column = question.column
        tolerance = self._config.tolerance if column.tolerance is None else column.tolerance
        rounding = _ROUNDING if isinstance(question.answer, float) else Fraction(0)
        options = ValueMatchOptions(
            self._graders,
            self._config.time_limit_s,
            max(Fraction(str(tolerance)), rounding),
            Fraction(str(column.absolute_tolerance)),
            self._config.units == "required",
        )
        replies = []
        for text, value in texts:
            if any(comparison_key(word) in (comparison_key(text), comparison_key(value)) for word in accepted):
                replies.append(GraderResult(OK, 1.0))
            else:
                replies.append(await compare_value(gold, text, value, options, unit=column.unit))
        return replies

    def _ordering(self, question: K12Question, found: FinalAnswer | None) -> Score:
        gold = parse_sequence(question.answer)
        if found is None:
            return Score(0.0, NO_ANSWER)
        answer = extract_order(found, gold, question.options)
        if answer is None:
            return Score(0.0, "unreadable")
        tau = kendall_tau(gold, answer)
        return Score(float(tau == 1) if self._config.ordering == "all" else max(0.0, tau))

    def _matching(self, question: K12Question, found: FinalAnswer | None) -> Score:
        gold = parse_pairs(question.answer)
        points = question.points(len(gold), "pairs")
        if found is None:
            return Score(0.0, NO_ANSWER)
        given = extract_pairs(found, gold)
        right = sum(weight for weight, (left, to) in zip(points, gold.items(), strict=True) if given.get(left) == to)
        share = right / sum(points)
        return Score(share if self._config.matching == "share" else float(share == 1), OK if given else "unreadable")

    async def _short(self, task: Task, question: K12Question, text: str) -> Score:
        answer = extract_short_answer(text)
        if question.column.keywords:
            points = question.points(len(question.keywords), "key points")
            if len(answer) > self._config.longest_short_answer:
                return Score(0.0, "too_long")
            return Score(key_point_credit(answer, question.keywords, points, question.column.wrong))
        rubric = question.column.rubric or (f"The reference answer is: {question.answer}" if question.answer else None)
        if rubric is None:
            raise RewardError("it is a short answer; give it `k12.rubric`, `k12.keywords` or a reference answer")
        if self._judge_model is None:
            raise RewardError(
                "it is a short answer with a rubric, and no model is set to judge it; give the reward the key `judge`, "
                "list its key points in `k12.keywords`, or leave such tasks out"
            )
        return Score(await self._judge_model.score(task, answer, rubric)) if answer else Score(0.0, NO_ANSWER)

    def _from_reply(self, reply: GraderResult) -> Score:
        earned = self._config.timeout_reward if reply.outcome == TIMEOUT else float(reply.value)
        return Score(earned, reply.outcome, reply.queue_s, reply.run_s)


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


def _golds(question: K12Question) -> list[str]:
    """Return the reference of every blank. Raises RewardError if one is neither text nor a number."""
    given = question.answer if isinstance(question.answer, list | tuple) else [question.answer]
    for each in given:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise RewardError(f"its answer has {each!r:.80} ({type(each).__name__}); a blank needs text or a number")
        if not str(each).strip():
            raise RewardError("its answer has an empty blank; give what belongs there, or leave the task out")
    if not given:
        raise RewardError("its answer is an empty list; give one entry for each blank")
    return [fold_text(str(each)) for each in given]


def _true_false(question: K12Question, found: FinalAnswer | None) -> Score:
    gold = question.answer if isinstance(question.answer, bool) else parse_truth_value(fold_text(str(question.answer)))
    if gold is None:
        raise RewardError(f"its answer {question.answer!r:.80} is neither true nor false; give true or false")
    if found is None:
        return Score(0.0, NO_ANSWER)
    given = parse_truth_value(found.text)
    return Score(float(given is gold), "unreadable" if given is None else OK)


def multiple_choice_credit(
    right: frozenset[str], named: frozenset[str], options: dict[str, str], config: K12Reward
) -> float:
    """Return the credit of the named options: 1 for exactly the right ones, else by the rule `multiple`."""
    if named == right:
        return 1.0
    if config.multiple == "all":
        return 0.0
    if config.multiple == "subset":
        share = len(named) / len(right) if config.subset_credit is None else config.subset_credit
        return share if named < right else 0.0
    wrong = len(options) - len(right) if options else 0
    missed = len(named - right) / wrong if wrong else float(bool(named - right))
    return max(0.0, len(named & right) / len(right) - missed)


def _details(question: K12Question, value: float) -> dict[str, float]:
    subject, grade = question.column.subject, question.column.grade
    names = [] if subject is None else [subject]
    names += [] if grade is None else [f"grade-{grade}"]
    return {re.sub(r"[^\w.-]+", "_", name.strip()): value for name in names if name.strip()}
