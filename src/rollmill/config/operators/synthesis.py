"""Operators that create experiences from rollouts, with the policy's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rollmill.config.operators.base import RewardOperatorSection, SuccessOperatorSection, reject_weighting_keys
from rollmill.config.rewards import Reward
from rollmill.user_code import import_object

if TYPE_CHECKING:
    from rollmill.rewards.builtin.code import CodeReward
else:
    CodeReward = import_object("rollmill.rewards.builtin.code:CodeReward")  # found by name, as all rewards are


class DemonstrationOperator(SuccessOperatorSection):
    """Turns successes into demonstrations, which `mix`, `chord` and `sft` imitate."""

    creates_experiences: ClassVar[bool] = True

    implementation = "rollmill.pipelines.synthesis:DemonstrationMaker"
    name: Literal["demonstrations"] = "demonstrations"
    choose: Literal["best", "shortest", "first"] = "best"
    """Ranking of a group's successes. Ties are broken by length with `best`, and by reward with `shortest`."""
    count: int | None = Field(1, ge=1)
    """Maximum number per group; null: all."""
    per_task: int | None = Field(None, ge=1)
    """Maximum number per task in the whole run. Default: no limit."""
    memory: int = Field(100_000, ge=1)
    """Number of tasks to count; the least recently seen are dropped first. Only with `per_task`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("memory",), self.per_task is not None, "with per_task")
        return self


class PreferencePairOperator(SuccessOperatorSection):
    """Creates preference pairs from a group's completions, for `dpo` and reward models."""

    creates_experiences: ClassVar[bool] = True

    compares = True
    implementation = "rollmill.pipelines.synthesis:preference_pairs"
    name: Literal["pairs"] = "pairs"
    by: Literal["reward", "length"] = "reward"
    """`reward`: the best against the worst, the second best against the second worst, and so on. `length` (Kimi k1.5):
    the shortest success against longer failures and much longer successes."""
    count: int = Field(1, ge=1)
    """Maximum number of pairs per group."""
    margin: float = Field(0.0, ge=0)
    """Minimum difference between the rewards of a pair (exclusive). Only with `by: reward`."""
    longer: float = Field(1.5, gt=1)
    """Length ratio from which a success is much longer. Only with `by: length`."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("margin",), self.by == "reward", "with by: reward")
        self.reject_unused_keys(("longer", "threshold"), self.by == "length", "with by: length")
        return self


class ReflectionOperator(SuccessOperatorSection):
    """Creates a demonstration from a failed attempt, a cue and a correct solution; the attempt is masked."""

    creates_experiences: ClassVar[bool] = True

    implementation = "rollmill.pipelines.synthesis:reflection"
    name: Literal["reflection"] = "reflection"
    cue: str = Field("\n\nWait, that is not right. Let me try again.\n\n", min_length=1)
    """Text between the attempt and the solution."""
    imitate_cue: bool = True
    """Include the cue in the loss, so that the policy learns to correct itself."""
    solution: Literal["any", "group", "task"] = "any"
    """Source of the solution: the shortest success of the group, the task's worked solution, or the first of these that
    exists."""
    count: int = Field(1, ge=1)
    """Maximum number per group."""

    @property
    def compares_completions(self) -> bool:
        return self.solution == "group"


class GeneratedTestsOperator(RewardOperatorSection):
    """Runs code that passed its tests on generated tests, too, once a task has enough solutions to generate them.

    Tasks with a column `generator` (a program that reads a number and prints a case) get tests by Kimi k1.5's rules
    from the run's own successes: a case is valid if enough of them agree, and the tests are used if enough of them pass
    all. A success that fails these tests earns `reward`.
    """

    implementation = "rollmill.pipelines.generated_tests:TestGenerator"
    name: Literal["test_cases"] = "test_cases"
    generator: str = "generator"
    """Column of the task with the program that generates cases."""
    threshold: float = 1.0
    """Minimum reward (or part) of a success."""
    reward: float = 0.0
    """Reward of a success that fails generated tests."""
    cases: int = Field(50, ge=1)
    """Number of cases to generate per task."""
    submissions: int = Field(10, ge=1)
    """Number of distinct successes of a task to collect before its tests are generated."""
    agree: int = Field(7, ge=1)
    """Minimum number of submissions that agree on a valid case."""
    solve: int = Field(9, ge=1)
    """Minimum number of submissions that pass all valid cases."""
    memory: int = Field(200, ge=1)
    """Number of tasks whose successes and tests are remembered; the least recently seen are dropped first."""
    code: CodeReward = CodeReward(name="code")
    """Execution and comparison of programs: a reward `code`."""

    @property
    def reward_lists(self) -> list[tuple[tuple[str | int, ...], list[Reward]]]:
        """The reward `code`."""
        return [(("code",), [self.code])]

    @model_validator(mode="after")
    def _enough(self) -> Self:
        reject_weighting_keys(self.code, "code", "tests are passed or failed")
        for key in ("agree", "solve"):
            if getattr(self, key) > self.submissions:
                raise ValueError(f"{key} ({getattr(self, key)}) is above submissions ({self.submissions}); lower it")
        return self
