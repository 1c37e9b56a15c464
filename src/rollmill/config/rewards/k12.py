"""`rewards`: K-12 school questions."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmill.config.rewards.base import RewardSection
from rollmill.config.rewards.judges import JudgeReward
from rollmill.config.section import Section

K12Type = Literal["single", "multiple", "true_false", "blank", "numeric", "ordering", "matching", "short"]


class K12Reward(RewardSection):
    """Scores school questions by the rule of their type: single and multiple choice, true/false, blanks, numbers with
    units, ordering, matching, short answers. In English and Chinese. Reads the answer, without reasoning."""

    implementation = "rollmill.rewards.k12:K12Scorer"
    decides = True
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

    @field_validator("judge", mode="before")
    @classmethod
    def _named(cls, judge: Any) -> Any:
        return {"name": "judge", **judge} if isinstance(judge, dict) else judge

    @model_validator(mode="after")
    def _judge_is_a_part(self) -> Self:
        if self.judge is None:
            return self
        if dead := [key for key, of in RewardSection.model_fields.items() if getattr(self.judge, key) != of.default]:
            raise ValueError(f"judge: {', '.join(sorted(dead))} belongs to the k12 reward; put it beside `judge`")
        if not 0 <= self.judge.unparsable_reward <= 1:
            raise ValueError("judge: unparsable_reward has to be from 0 to 1, like every K-12 score")
        return self

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        if self.subset_credit is not None and self.multiple != "subset":
            raise ValueError(f"subset_credit is honoured only with multiple: subset (found {self.multiple})")
        return self


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
