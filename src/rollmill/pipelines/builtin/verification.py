"""Operators that score completions with further rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from rollmill.config.operators import OperatorSection, RewardOperatorSection, reject_weighting_keys
from rollmill.config.rewards import Reward, RewardConfig, reward_part_names
from rollmill.pipelines.batch import Batch, reward_value, to_completion
from rollmill.pipelines.reward_updates import RAW_REWARD, add_reward, init_reward_part, log_reward_detail, set_reward
from rollmill.rewards.base import GATED, LATE, TIMEOUT
from rollmill.types import Experience, ExperienceSource, Task

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig
    from rollmill.pipelines.pipeline import PipelineResources
    from rollmill.rewards import RewardManager, RewardResult

RewardKeyPath = tuple[str | int, ...]


class VerifyOperator(RewardOperatorSection):
    """Scores completions again with other rewards, and handles disagreements with the original reward.

    Completions that did not pass a gate are left unchanged.
    """

    name: Literal["verify"] = "verify"
    rewards: list[RewardConfig] = Field(min_length=1)
    """Verifying rewards, as in the run file's `rewards`. Their sum is compared with the reward, or with `part`."""
    weight: float = 1.0
    """Weight of `part` in the run file's `rewards`. Only with `part`."""
    tolerance: float = Field(0.01, ge=0)
    """Larger differences are disagreements."""
    otherwise: Literal["replace", "drop", "penalty"] = "replace"
    """On disagreement, replace the reward by the new one, drop the completion, or subtract `penalty`."""
    penalty: float = Field(1.0, gt=0)
    """Penalty to subtract. Only with `otherwise: penalty`."""
    share: float = Field(1.0, gt=0, le=1)
    """Verify only this fraction of the completions, chosen deterministically by their ids."""
    at_least: float | None = None
    """Verify only completions with at least this reward."""
    at_most: float | None = None
    """Verify only completions with at most this reward."""
    _seed: int = PrivateAttr()
    _scorer: RewardManager = PrivateAttr()

    @property
    def reward_lists(self) -> list[tuple[RewardKeyPath, list[Reward]]]:
        """The operator's rewards."""
        return [(("rewards",), list(self.rewards))]

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("penalty",), self.otherwise == "penalty", "with otherwise: penalty")
        self.reject_unused_keys(("weight",), self.part is not None, "with part")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least ({self.at_least:g}) is above at_most ({self.at_most:g}); change one")
        if all(reward.weight == 0 for reward in self.rewards):
            raise ValueError("every weight in rewards is 0, so there is nothing to compare with; give one another")
        return self

    @property
    def drops_completions(self) -> bool:
        return self.otherwise == "drop"

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        """Refuses a part whose weight is another one, and replaced sums beside an advantage that reads parts."""
        name = "" if self.part is None else self.part.partition("/")[0]
        if name in (names := reward_part_names(stage.rewards)):
            reward = stage.rewards[names.index(name)]
            if reward.after_steps:
                text = f"reward `{name}` counts after {reward.after_steps} steps, and `verify` cannot tell before and"
                yield "part", f"{text} after; verify the sum, or remove after_steps"
            if reward.weight != self.weight:
                text = f"reward `{name}` has weight {reward.weight:g}, and `verify` would take it for {self.weight:g}"
                yield "weight", f"{text}; give weight: {reward.weight:g}"
        advantage = getattr(stage.algorithm, "advantage", None)
        if self.part is None and self.otherwise == "replace" and advantage is not None and advantage.uses_parts:
            text = f"advantage `{advantage.name}` sees the parts of the reward, and `verify` changes their sum"
            yield "name", f"{text}; say which part it verifies"

    def setup(self, resources: PipelineResources) -> None:
        self._seed, self._scorer = resources.seed, resources.build_reward_manager(self.rewards)

    async def __call__(self, batch: Batch) -> None:
        adds_part = {"replace": self.part is None, "penalty": True, "drop": False}
        if adds_part[self.otherwise]:
            init_reward_part(batch)
        for group in batch.groups().values():
            chosen = [each for each in group if self._is_chosen(each)]
            for experience, result in zip(chosen, await score_group(self._scorer, batch, chosen), strict=True):
                self._compare(batch, experience, result)

    def close(self) -> None:
        """Stop the processes of its rewards."""
        self._scorer.close()

    def _is_chosen(self, experience: Experience) -> bool:
        value = reward_value(experience, self.part)
        if GATED in experience.info.get("outcomes", {}).values():
            return False
        bounded = self.at_least is not None or self.at_most is not None
        if value is None and (bounded or self.otherwise != "replace"):
            return False
        if value is not None and self.at_least is not None and value < self.at_least:
            return False
        if value is not None and self.at_most is not None and value > self.at_most:
            return False
        digest = sha256(f"{self._seed}:{experience.id}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:8]) / 2**64 < self.share

    def _compare(self, batch: Batch, experience: Experience, result: RewardResult) -> None:
        score, before = result.reward, reward_value(experience, self.part)
        for name, value in result.parts.items():
            log_reward_detail(experience, f"pipeline/{batch.operator}/{name}", value)
        if score is None or is_undecided(result, self.rewards):
            batch.note("not verified")
        elif before is not None and abs(score - before) <= self.tolerance:
            batch.note("confirmed")
        elif self.otherwise == "drop":
            batch.drop(experience, "refuted")
        elif self.otherwise == "penalty":
            add_reward(batch, experience, -self.penalty, "penalised")
        else:
            self._replace(batch, experience, before, score)

    def _replace(self, batch: Batch, experience: Experience, before: float | None, score: float) -> None:
        if self.part is None:
            set_reward(batch, experience, score, "replaced")
            return
        experience.info.setdefault(RAW_REWARD, experience.reward)
        experience.info.setdefault("raw_parts", {})[self.part] = before
        experience.reward_parts[self.part] = score
        if experience.reward is not None or before is None:  # a part may exist that does not count yet
            experience.reward = (experience.reward or 0.0) + self.weight * (score - (before or 0.0))
        batch.change(experience, "replaced")


class CheckOperator(OperatorSection):
    """Keeps completions and demonstrations that score high enough on one reward, such as format or language."""

    handles = frozenset({ExperienceSource.ROLLOUT, ExperienceSource.EXPERT})
    name: Literal["check"] = "check"
    reward: RewardConfig
    """A reward as in the run file's `rewards`, such as {name: format, tags: [think, answer]}."""
    at_least: float = 1.0
    """Minimum value of the reward. Completions to which it does not apply, or that time out, are kept."""
    otherwise: Literal["drop", "penalty"] = "drop"
    """Drop the other completions, or subtract `penalty` from their reward. Demonstrations have no reward: they are
    dropped, and not given to the operator otherwise."""
    penalty: float = Field(1.0, gt=0)
    """Penalty to subtract. Only with `otherwise: penalty`."""
    _scorer: RewardManager = PrivateAttr()

    @property
    def taken(self) -> frozenset[ExperienceSource]:
        return super().taken if self.otherwise == "drop" else frozenset({ExperienceSource.ROLLOUT})

    @property
    def reward_lists(self) -> list[tuple[RewardKeyPath, list[Reward]]]:
        """The operator's reward."""
        return [(("reward",), [self.reward])]

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("penalty",), self.otherwise == "penalty", "with otherwise: penalty")
        self.reject_unused_keys(("sources",), self.otherwise == "drop", "with otherwise: drop")
        reject_weighting_keys(self.reward, "reward", "the reward is compared with at_least as it is")
        return self

    @property
    def drops_completions(self) -> bool:
        return self.otherwise == "drop"

    def setup(self, resources: PipelineResources) -> None:
        self._scorer = resources.build_reward_manager([self.reward])

    async def __call__(self, batch: Batch) -> None:
        if self.otherwise == "penalty":
            init_reward_part(batch)
        for group in [own for source in self.handles for own in batch.groups(source).values()]:
            for experience, result in zip(group, await score_group(self._scorer, batch, group), strict=True):
                value = result.reward
                log_reward_detail(experience, f"pipeline/{batch.operator}/value", value)
                if value is None or is_undecided(result, [self.reward]):
                    batch.note("not checked")
                elif value < self.at_least:
                    if self.otherwise == "drop":
                        batch.drop(experience, "refused")
                    else:
                        add_reward(batch, experience, -self.penalty, "penalised")

    def close(self) -> None:
        """Stop the processes of its rewards."""
        self._scorer.close()


async def score_group(
    rewards: RewardManager, batch: Batch, experiences: Sequence[Experience], *, task: Task | None = None
) -> list[RewardResult]:
    """Score experiences of one group, with their task or with `task`."""
    if not experiences:
        return []
    task = task or batch.context.task(experiences[0].task_id)
    return await rewards.score_group(task, [to_completion(each, index) for index, each in enumerate(experiences)])


def is_undecided(result: RewardResult, rewards: Sequence[Reward]) -> bool:
    """True if some reward timed out, so that the result is not valid. A timeout of the completion's code is valid."""
    judged_late = {
        name for name, each in zip(reward_part_names(rewards), rewards, strict=True) if each.timeout_is_verdict
    }
    return any(
        outcome == LATE or (outcome == TIMEOUT and name not in judged_late) for name, outcome in result.outcomes.items()
    )
