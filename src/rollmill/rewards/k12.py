"""The K-12 reward: grades school questions with rollmill-grading, and leaves rubrics of short answers to a judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rollmill.config.rewards.k12 import K12Column, K12Reward
from rollmill.errors import RewardError
from rollmill.rewards.base import NO_ANSWER, TIMEOUT, Score, find_answer, task_options
from rollmill.rewards.resources import RewardResources
from rollmill.types import Completion, Task
from rollmill_grading.errors import MissingPintError
from rollmill_grading.school.answer_types import extract_short_answer
from rollmill_grading.school.grader import MarkingScheme, SchoolGrader
from rollmill_grading.school.question import SchoolQuestion
from rollmill_grading.symbolic import ALGEBRA

if TYPE_CHECKING:
    from rollmill.rewards.judges.generative import RubricJudge


class K12Scorer:
    """A score from 0 to 1 by the rule of the question's type; None if the task has no answer.

    `details` has the same number under the task's subject and `grade-N`. Outcomes besides ok: `no_answer`, `unreadable`
    (an answer that does not fit its type or contradicts itself), `hedged`, `too_long`, `too_deep`, `too_costly`,
    `timeout`, `memory`.
    """

    def __init__(self, config: K12Reward, resources: RewardResources) -> None:
        self._config = config
        scheme = MarkingScheme(
            multiple=config.multiple,
            subset_credit=config.subset_credit,
            blanks=config.blanks,
            ordering=config.ordering,
            matching=config.matching,
            tolerance=config.tolerance,
            units=config.units,
            longest_short_answer=config.longest_short_answer,
        )
        self._grader = SchoolGrader(scheme, resources.graders_for(ALGEBRA), time_limit_s=config.time_limit_s)
        self._judge_model: RubricJudge | None = None
        if config.judge is not None:
            from rollmill.rewards.judges.generative import RubricJudge

            self._judge_model = RubricJudge(config.judge, resources)

    def counters(self) -> dict[str, float]:
        """Return the counters of the judge of short answers."""
        return {} if self._judge_model is None else self._judge_model.counters()

    async def score(self, task: Task, completion: Completion) -> Score:
        column = read_column(task)
        question = read_question(task, column)
        if question is None:
            return Score(None)
        text = find_answer(completion)
        if text is None:
            score = Score(0.0, NO_ANSWER)
        elif question.kind == "short" and not question.keywords:
            score = await self._judged(task, question, text)
        else:
            score = await self._graded(question, text)
        assert isinstance(score.value, float)
        return replace(score, details=_details(task, column, score.value))

    async def _graded(self, question: SchoolQuestion, text: str) -> Score:
        try:
            verdict = await self._grader.grade_async(text, question)
        except MissingPintError as error:
            raise RewardError("comparing units needs pint: pip install 'rollmill[k12]'") from error
        value = self._config.timeout_reward if verdict.outcome == TIMEOUT else verdict.score
        return Score(value, verdict.outcome, verdict.queue_s, verdict.run_s)

    async def _judged(self, task: Task, question: SchoolQuestion, text: str) -> Score:
        answer = extract_short_answer(text)
        rubric = question.rubric or (f"The reference answer is: {question.answer}" if question.answer else None)
        if rubric is None:
            raise RewardError("it is a short answer; give it `k12.rubric`, `k12.keywords` or a reference answer")
        if self._judge_model is None:
            raise RewardError(
                "it is a short answer with a rubric, and no model is set to judge it; give the reward the key `judge`, "
                "list its key points in `k12.keywords`, or leave such tasks out"
            )
        return Score(await self._judge_model.score(task, answer, rubric)) if answer else Score(0.0, NO_ANSWER)


def read_column(task: Task) -> K12Column:
    """Return a task's column `k12`, which may be missing. Raises RewardError if it is invalid."""
    given = task.metadata.get("k12")
    if given is not None and not isinstance(given, Mapping):
        raise RewardError(f"its column `k12` is {given!r:.80}; it has to be a mapping such as {{type: single}}")
    try:
        return K12Column.model_validate(dict(given or {}))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RewardError(f"its `k12.{place}` is wrong: {first['msg']}") from error


def read_question(task: Task, column: K12Column) -> SchoolQuestion | None:
    """Return the question of a task; None if it has neither an answer nor criteria for a short answer.

    Raises GradingError if the column has a key that the type of question does not use.
    """
    answer = task.answer if column.answer is None else column.answer
    has_criteria = column.type == "short" or (column.type is None and (column.rubric is not None or column.keywords))
    if answer is None and not has_criteria:
        return None
    options = task_options({"options": column.options} if column.options else task.metadata)
    comparison = column.model_dump(exclude={"type", "answer", "options", "subject", "grade"})
    return SchoolQuestion(answer, column.type or "auto", options, **comparison, key_prefix="k12.")


def _details(task: Task, column: K12Column, value: float) -> dict[str, float]:
    """Return the value under the subject and the grade, which may be columns of the task, too."""
    subject, grade = (
        found if found is not None or not isinstance(own := task.metadata.get(name), str | int) else own
        for name, found in (("subject", column.subject), ("grade", column.grade))
    )
    names = [] if subject is None else [str(subject)]
    names += [] if grade is None else [f"grade-{grade}"]
    return {re.sub(r"[^\w.-]+", "_", name.strip()): value for name in names if name.strip()}
