"""Operators that make new experiences from what was rolled out. The tokens are those that the policy produced."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import RewardOperatorSection, SuccessOperatorSection, reject_weighting_keys
from rollmill.config.rewards import CodeReward, RewardSection


class DemonstrationOperator(SuccessOperatorSection):
    """Successes become expert experiences, which `mix`, `chord` and `sft` imitate."""

    creates_experiences: ClassVar[bool] = True

    name: Literal["demonstrations"] = "demonstrations"
    choose: Literal["best", "shortest", "first"] = "best"
    """Which of a group's successes go first. Equally good ones: the shorter; equally short ones: the better."""
    count: int | None = Field(1, ge=1)
    """How many of a group at most; null: all."""
    per_task: int | None = Field(None, ge=1)
    """How many of a task in the whole run at most. Default: no bound."""
    memory: int = Field(100_000, ge=1)
    """Tasks that are counted; what was not seen for longest is forgotten. Only with `per_task`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.per_task is not None, "with per_task")
        return self


class PreferencePairOperator(SuccessOperatorSection):
    """Pairs of a group's completions, of which one is preferred, for `dpo` and reward models."""

    creates_experiences: ClassVar[bool] = True

    name: Literal["pairs"] = "pairs"
    by: Literal["reward", "length"] = "reward"
    """`reward`: the best against the worst, the second best against the second worst, and so on. `length` (Kimi k1.5):
    the shortest success against longer failures and much longer successes."""
    count: int = Field(1, ge=1)
    """How many of a group at most."""
    margin: float = Field(0.0, ge=0)
    """The rewards of a pair differ by more than this. Only with `by: reward`."""
    longer: float = Field(1.5, gt=1)
    """A success is much longer from this many times the length. Only with `by: length`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("margin",), self.by == "reward", "with by: reward")
        self.reject_unused_keys(("longer", "threshold"), self.by == "length", "with by: length")
        return self


class ReflectionOperator(SuccessOperatorSection):
    """A failed attempt, a second thought and a correct solution become one expert experience; the attempt is masked."""

    creates_experiences: ClassVar[bool] = True

    name: Literal["reflection"] = "reflection"
    cue: str = Field("\n\nWait, that is not right. Let me try again.\n\n", min_length=1)
    """The text between the attempt and the solution."""
    imitate_cue: bool = True
    """The cue counts in the loss, so that the policy learns to have second thoughts."""
    solution: Literal["any", "group", "task"] = "any"
    """Where the solution comes from: the shortest success of the group, the task's worked solution, or the first of
    these that there is."""
    count: int = Field(1, ge=1)
    """How many of a group at most."""


class GeneratedTestsOperator(RewardOperatorSection):
    """Code that passed its tests has to pass generated ones, too, once there are enough solutions to make them.

    Tasks with a column `generator` (a program that reads a number and prints a case) get tests by Kimi k1.5's rules
    from the run's own successes: a case is valid where enough of them agree, and the tests are used where enough of
    them pass all. A success that fails these tests earns `reward`.
    """

    name: Literal["test_cases"] = "test_cases"
    generator: str = "generator"
    """Column of the task with the program that makes cases."""
    threshold: float = 1.0
    """Code is a success when its reward (or the part) is at least this."""
    reward: float = 0.0
    """What a success earns that fails generated tests."""
    cases: int = Field(50, ge=1)
    """Cases made for a task."""
    submissions: int = Field(10, ge=1)
    """Different successes of a task that are collected before its tests are made."""
    agree: int = Field(7, ge=1)
    """How many of them have to agree on a case."""
    solve: int = Field(9, ge=1)
    """How many of them have to pass all valid cases."""
    memory: int = Field(200, ge=1)
    """Tasks whose successes and tests are remembered; what was not seen for longest is forgotten."""
    code: CodeReward = CodeReward(name="code")
    """How programs are run and compared: a reward `code`."""

    @property
    def reward_lists(self) -> list[tuple[tuple[str | int, ...], list[RewardSection]]]:
        """The reward `code`."""
        return [(("code",), [self.code])]

    @model_validator(mode="after")
    def _enough(self) -> Self:
        reject_weighting_keys(self.code, "code", "tests are passed or failed")
        for key in ("agree", "solve"):
            if getattr(self, key) > self.submissions:
                raise ValueError(f"{key} ({getattr(self, key)}) is above submissions ({self.submissions}); lower it")
        return self
