"""The K-12 reward: grades school questions with rollmill-grading, and leaves rubrics of short answers to a judge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from rollmill.config.rewards import Reward
from rollmill.config.section import Section
from rollmill.errors import RewardError
from rollmill.rewards.base import NO_ANSWER, TIMEOUT, Score, find_answer, task_options
from rollmill.rewards.builtin.judge import JudgeReward
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.school.grader import SchoolGrader
    from rollmill_grading.school.question import SchoolQuestion

K12Type = Literal["single", "multiple", "true_false", "blank", "numeric", "ordering", "matching", "short"]


class K12Column(Section):
    """The column `k12` of a task. It may be omitted if type and answer are clear without it."""

    type: K12Type | None = None
    """Question type. Default: inferred from the answer."""
    answer: Any = None
    """Reference answer, if it is not the task's answer."""
    options: dict[str, str] | list[str] | None = None
    """Texts of the options, by letter or in order. Default: the task's column `options` or `choices`."""
    synonyms: list[str | list[str]] = []
    """Other accepted texts: a list per blank; for a single blank also one plain list."""
    unordered: bool = False
    """The blanks may be filled in any order."""
    tolerance: float | None = Field(None, ge=0, lt=1)
    """Accepted relative error of numbers. Default: the reward's."""
    absolute_tolerance: float = Field(0.0, ge=0)
    """Accepted absolute error in the unit of the reference; the larger of the two tolerances counts."""
    unit: str | None = None
    """Unit of the reference: `km/h`, `千克`."""
    points: list[float] = []
    """Weights of the blanks, pairs or key points."""
    rubric: str | None = None
    """Rubric of a short answer, for the judge."""
    keywords: list[str | list[str]] = []
    """Key points of a short answer; a list holds alternative wordings of one point."""
    wrong: list[str] = []
    """Texts that a right short answer must not contain."""
    subject: str | None = None
    """Subject, for metrics by subject and grade. Default: the task's columns `subject` and `grade`."""
    grade: str | int | None = None


class K12Reward(Reward):
    """Scores school questions by the rule of their type: single and multiple choice, true/false, blanks, numbers with
    units, ordering, matching, short answers. In English and Chinese. Reads the answer, without reasoning."""

    decides = True
    compares_answers = True
    largest = 1.0
    name: Literal["k12"]
    multiple: Literal["subset", "all", "per_option"] = "subset"
    """Multiple choice. `subset`: a subset of the right options earns partial credit, any wrong option earns 0 (gaokao);
    `all`: all or nothing; `per_option`: fraction of the right options chosen minus fraction of the wrong ones chosen,
    at least 0."""
    subset_credit: float | None = Field(None, ge=0, lt=1)
    """With `multiple: subset`, the credit of any proper subset of the right options: 0.4 is the gaokao's rule until
    2023. Default: the fraction of the right options, its rule since 2024."""
    blanks: Literal["share", "all"] = "share"
    """Several blanks: the fraction that is right, or all or nothing."""
    ordering: Literal["all", "pairs"] = "all"
    """Sequences: all or nothing, or Kendall's tau, at least 0."""
    matching: Literal["share", "all"] = "share"
    """Pairs: the fraction that is right, or all or nothing."""
    tolerance: float = Field(0.0, ge=0, lt=1)
    """Accepted relative error of numbers, for tasks without their own `tolerance`."""
    units: Literal["optional", "required"] = "optional"
    """Whether a number may omit the unit of the reference. A wrong unit is always wrong."""
    longest_short_answer: int = Field(600, ge=1)
    """Maximum length in characters of a short answer scored by key points; a longer one earns 0."""
    time_limit_s: float = Field(60.0, gt=0)
    """Guard against a hang in one formula, far above what a comparison takes: its steps are limited, so that no verdict
    depends on the load of the machine. The grader process is then killed and the outcome is `timeout`."""
    judge: JudgeReward | None = None
    """LLM judge of short answers that have a rubric or a reference but no key points: keys of the reward `judge`."""
    _grader: SchoolGrader
    _judge: JudgeReward | None

    @field_validator("judge", mode="before")
    @classmethod
    def _named(cls, judge: Any) -> Any:
        return {"name": "judge", **judge} if isinstance(judge, dict) else judge

    @model_validator(mode="after")
    def _judge_is_a_part(self) -> Self:
        if self.judge is None:
            return self
        if dead := [key for key, of in Reward.model_fields.items() if getattr(self.judge, key) != of.default]:
            raise ValueError(f"judge: {', '.join(sorted(dead))} belongs to the k12 reward; put it beside `judge`")
        if not 0 <= self.judge.unparsable_reward <= 1:
            raise ValueError("judge: unparsable_reward has to be from 0 to 1, like every K-12 score")
        return self

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        if self.subset_credit is not None and self.multiple != "subset":
            raise ValueError(f"subset_credit is honoured only with multiple: subset (found {self.multiple})")
        return self

    def reference_of(self, task: Task) -> Any:
        column = task.metadata.get("k12")
        own = column.get("answer") if isinstance(column, Mapping) else None
        return task.answer if own is None else own

    def setup(self, resources: RewardResources) -> None:
        from rollmill_grading.school.grader import MarkingScheme, SchoolGrader
        from rollmill_grading.symbolic import ALGEBRA

        scheme = MarkingScheme(
            multiple=self.multiple,
            subset_credit=self.subset_credit,
            blanks=self.blanks,
            ordering=self.ordering,
            matching=self.matching,
            tolerance=self.tolerance,
            units=self.units,
            longest_short_answer=self.longest_short_answer,
        )
        self._grader = SchoolGrader(scheme, resources.graders_for(ALGEBRA), time_limit_s=self.time_limit_s)
        self._judge = None if self.judge is None else self.judge.prepare(resources)

    def counters(self) -> dict[str, float]:
        """Return the counters of the judge of short answers."""
        return {} if self._judge is None else self._judge.counters()

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the score by the rule of the question's type; none for a task without an answer.

        `details` has the same number under the task's subject and `grade-N`. Outcomes besides ok: `no_answer`,
        `unreadable` (an answer that does not fit its type or contradicts itself), `hedged`, `too_long`, `too_deep`,
        `too_costly`, `timeout`, `memory`.
        """
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
        from rollmill_grading.errors import MissingPintError

        try:
            verdict = await self._grader.grade_async(text, question)
        except MissingPintError as error:
            raise RewardError("comparing units needs pint: pip install 'rollmill[k12]'") from error
        value = self.timeout_reward if verdict.outcome == TIMEOUT else verdict.score
        return Score(value, verdict.outcome, verdict.queue_s, verdict.run_s)

    async def _judged(self, task: Task, question: SchoolQuestion, text: str) -> Score:
        from rollmill_grading.school.answer_types import extract_short_answer

        answer = extract_short_answer(text)
        rubric = question.rubric or (f"The reference answer is: {question.answer}" if question.answer else None)
        if rubric is None:
            raise RewardError("it is a short answer; give it `k12.rubric`, `k12.keywords` or a reference answer")
        if self._judge is None:
            raise RewardError(
                "it is a short answer with a rubric, and no model is set to judge it; give the reward the key `judge`, "
                "list its key points in `k12.keywords`, or leave such tasks out"
            )
        if not answer:
            return Score(0.0, NO_ANSWER)
        return Score((await self._judge.grade(task, answer, rubric)).value)


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
    from rollmill_grading.school.question import SchoolQuestion

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
