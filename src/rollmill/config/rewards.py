"""`rewards`: scoring of completions. Each entry is one part, a section or a name; the reward is their weighted sum.

This module has the base class of rewards, and the settings that they share. The rewards themselves are the classes in
`rollmill/rewards/builtin/`, which is searched: a new one is one file there.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Awaitable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rollmill.config.section import Section, expand_name, find_sections, section_union

if TYPE_CHECKING:
    from rollmill.rewards.base import RewardResult, Score
    from rollmill.rewards.resources import RewardResources
    from rollmill.rollout.containers import Container
    from rollmill.types import Completion, Task

_BUILT_IN = "rollmill.rewards.builtin"


class GateConfig(Section):
    """Makes a reward a gate: completions that do not pass it earn a fixed reward, and no other reward is computed."""

    at_least: float
    """Minimum value to pass, within the reward's `clip` and before its weight; the sum if the reward gives several
    numbers. A task that the reward does not apply to passes."""
    otherwise: float = 0.0
    """The completion's whole reward if it does not pass. The lowest of several failed gates counts."""


class Reward(Section):
    """Base of rewards. The fields of a reward are its keys in the run file; its methods score completions.

    A reward overrides `score`, or `score_group` if it compares the completions of a task. A section of a run file is
    only a value: what scores is a copy of it, from `prepare`, whose private attributes hold what it works with. An
    exception that a reward raises ends the run as a RewardError.
    """

    if TYPE_CHECKING:
        name: str  # of every reward of a run file

    timeout_is_verdict: ClassVar[bool] = False
    """The outcome `timeout` judges the completion, as that of its own program does; else the verdict is missing."""
    decides: ClassVar[bool] = False
    """Says whether an answer is right. A task has one such reward, unless `reward_settings.verdicts` is `several`."""
    largest: ClassVar[float | None] = None
    """Largest value, before clip and weight; None: not known."""
    compares_answers: ClassVar[bool] = False
    """Compares with the task's answer. For other rewards an empty one may be intended."""
    scope: ClassVar[Literal["completion", "group", "either"]] = "completion"
    """Scores a single completion (`score`), all of a task together (`score_group`), or either."""
    needs_generator: ClassVar[bool] = False
    """Scores only tasks of a `generator`."""
    uses_container: ClassVar[bool] = False
    """Looks into the rollout's container (`score_container`), once its agent has ended."""
    weight: float = 1.0
    """Weight of this part in the sum. At 0 it is only logged."""
    clip: tuple[float, float] | None = None
    """Bounds of each of the reward's numbers, applied before the weight."""
    gate: GateConfig | None = None
    """Makes the reward a gate, computed before all others."""
    after_steps: int = Field(0, ge=0)
    """Number of training steps after which the reward counts (and its gate applies), by the policy that sampled the
    completion; before that, it is only logged."""
    role: str | None = None
    """Role whose replies the reward scores, one of `roles`. Default: it scores replies in all roles."""
    timeout_reward: float = 0.0
    """Reward of completions whose scoring times out (outcomes `timeout` and `late`)."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        return self

    @property
    def part_name(self) -> str:
        """Name in the results, unless an earlier reward of the list has it."""
        return self.name

    @property
    def offloadable_model(self) -> Path | None:
        """Folder of a model that it keeps in memory on the run's device, and that is offloaded with the run's own."""
        return None

    @property
    def longest_request_s(self) -> float | None:
        """Time limit of a request to its endpoint, retries included; None without an endpoint."""
        return None

    def other_rewards(self) -> dict[str, str]:
        """Returns the names of the rewards of single completions whose results it reads, by the key that says so."""
        return {}

    def applies_to(self, task: Task) -> bool:
        """Returns False if it has no score for the task, as the task's columns say."""
        return True

    def reference_of(self, task: Task) -> Any:
        """Returns the answer that it compares with."""
        return task.answer

    def scored_tasks(self, tasks: Sequence[Task], name: str) -> list[Task]:
        """Returns the tasks that it scores under its name in the results: those whose row names no other rewards."""
        return [task for task in tasks if name in (task.rewards or [name]) and self.applies_to(task)]

    def check_tasks(self, tasks: Sequence[Task], name: str) -> None:
        """Raises ConfigError if it cannot score one of `scored_tasks`, before anything is rolled out."""

    def prepare(self, resources: RewardResources) -> Self:
        """Returns a copy that can score. Raises like `setup`."""
        prepared = self.model_copy()
        prepared.setup(resources)
        return prepared

    def setup(self, resources: RewardResources) -> None:
        """Acquires what scoring needs, such as processes and models, and keeps it in private attributes.

        Raises ConfigError or ModelError if it is not there.
        """

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        """Returns the score if it needs no waiting, else starts the work for it and returns what to await."""
        return self.score(task, completion)

    async def score(self, task: Task, completion: Completion) -> Score:
        """Scores one completion."""
        raise NotImplementedError

    async def score_container(self, task: Task, container: Container) -> Score:
        """Scores what an agent has left in its container."""
        raise NotImplementedError

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Scores all completions of a task: one score each, in their order.

        Args:
            judged: the results of the rewards that score single completions.
        """
        raise NotImplementedError

    def counters(self) -> dict[str, float]:
        """Returns sums since `setup`, such as calls and their cost, by name."""
        return {}


class RewardManagerConfig(Section):
    """Settings of the reward manager, shared by all rewards."""

    workers: int = Field(1, ge=1)
    """Number of grader processes, which compare formulas and run generators' scorers. Each starts on first use."""
    deadline_s: float = Field(300.0, gt=0)
    """Timeout of one reward of one completion, including waiting for a free worker. The outcome is then `late` and the
    reward its `timeout_reward`."""
    clip: tuple[float, float] | None = None
    """Bounds of the weighted sum."""
    verdicts: Literal["one", "several"] = "one"
    """`one`: two rewards of the list that both say whether an answer is right, such as math and k12, are refused where
    they apply to the same task, since its maximum would be 2. `several`: they add up."""
    missing_limit: float = Field(0.5, gt=0, le=1)
    """Largest share of a step's judgements of one reward that may end without a verdict: they took too long, or the
    reward's model gave none. Above it the run warns."""
    missing_steps: int = Field(3, ge=0)
    """Steps in a row above `missing_limit` that end the run with an error; 0: none."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        return self


def attainable_maximum(
    rewards: Sequence[Reward], settings: RewardManagerConfig, named: Collection[str] | None = None
) -> float | None:
    """Returns the largest sum that a completion can earn; None if it is not known.

    A reward with a negative weight counts as 0.

    Args:
        named: names of the rewards that a task's row asks for (`taskset.fields.rewards`); default: all.
    """
    total = 0.0
    for name, reward in zip(reward_part_names(rewards), rewards, strict=True):
        if reward.weight <= 0 or (named is not None and name not in named):
            continue
        largest = reward.largest
        if reward.clip is not None:
            largest = reward.clip[1] if largest is None else min(max(largest, reward.clip[0]), reward.clip[1])
        if largest is None:
            return None if settings.clip is None else settings.clip[1]
        total += reward.weight * largest
    return total if settings.clip is None else min(max(total, settings.clip[0]), settings.clip[1])


def reward_part_names(rewards: Sequence[Reward]) -> list[str]:
    """Returns one name per reward: its own or its Python function's; a second one of the same name is name#2."""
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        name = reward.part_name
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


@cache
def built_in_rewards() -> list[type[Reward]]:
    """Returns the rewards of `rollmill/rewards/builtin/`."""
    return find_sections(_BUILT_IN, importlib.import_module(_BUILT_IN).__path__, Reward)


if TYPE_CHECKING:
    RewardConfig = Reward
else:

    def __getattr__(name: str) -> Any:
        """Makes `RewardConfig`, the type of a reward in a run file, on first use: the rewards import this module."""
        if name != "RewardConfig":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        made = Annotated[section_union(built_in_rewards()), BeforeValidator(expand_name)]
        return globals().setdefault(name, made)
