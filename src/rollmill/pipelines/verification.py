"""Operators that score completions with further rewards."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from rollmill.config.operators.filters import CheckOperator, VerifyOperator
from rollmill.config.rewards import Reward, reward_part_names
from rollmill.pipelines.batch import Batch, reward_value, to_completion
from rollmill.pipelines.pipeline import PipelineResources
from rollmill.pipelines.reward_updates import RAW_REWARD, add_reward, init_reward_part, log_reward_detail, set_reward
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.base import GATED, LATE, TIMEOUT
from rollmill.types import Experience, Task


class RewardVerifier:
    """Replaces, penalises or drops completions whose reward disagrees with independent rewards.

    Completions that these cannot score, and those that a gate excluded, do not change.
    """

    def __init__(self, options: VerifyOperator, resources: PipelineResources) -> None:
        self._options, self._seed = options, resources.seed
        self._rewards = resources.build_reward_manager(options.rewards)

    async def __call__(self, batch: Batch) -> None:
        adds_part = {"replace": self._options.part is None, "penalty": True, "drop": False}
        if adds_part[self._options.otherwise]:
            init_reward_part(batch)
        for group in batch.groups().values():
            chosen = [each for each in group if self._is_chosen(each)]
            for experience, result in zip(chosen, await score_group(self._rewards, batch, chosen), strict=True):
                self._compare(batch, experience, result)

    def close(self) -> None:
        """Stop the processes of its rewards."""
        self._rewards.close()

    def _is_chosen(self, experience: Experience) -> bool:
        options, value = self._options, reward_value(experience, self._options.part)
        if GATED in experience.info.get("outcomes", {}).values():
            return False
        bounded = options.at_least is not None or options.at_most is not None
        if value is None and (bounded or options.otherwise != "replace"):
            return False
        if value is not None and options.at_least is not None and value < options.at_least:
            return False
        if value is not None and options.at_most is not None and value > options.at_most:
            return False
        return _hash_uniform(f"{self._seed}:{experience.id}") < options.share

    def _compare(self, batch: Batch, experience: Experience, result: RewardResult) -> None:
        score, before = result.reward, reward_value(experience, self._options.part)
        for name, value in result.parts.items():
            log_reward_detail(experience, f"pipeline/{batch.operator}/{name}", value)
        if score is None or is_undecided(result, self._options.rewards):
            batch.note("not verified")
        elif before is not None and abs(score - before) <= self._options.tolerance:
            batch.note("confirmed")
        elif self._options.otherwise == "drop":
            batch.drop(experience, "refuted")
        elif self._options.otherwise == "penalty":
            add_reward(batch, experience, -self._options.penalty, "penalised")
        else:
            self._replace(batch, experience, before, score)

    def _replace(self, batch: Batch, experience: Experience, before: float | None, score: float) -> None:
        part = self._options.part
        if part is None:
            set_reward(batch, experience, score, "replaced")
            return
        experience.info.setdefault(RAW_REWARD, experience.reward)
        experience.info.setdefault("raw_parts", {})[part] = before
        experience.reward_parts[part] = score
        if experience.reward is not None or before is None:  # a part may exist that does not count yet
            experience.reward = (experience.reward or 0.0) + self._options.weight * (score - (before or 0.0))
        batch.change(experience, "replaced")


class RewardChecker:
    """Drops or penalises completions below a minimum of a further reward."""

    def __init__(self, options: CheckOperator, resources: PipelineResources) -> None:
        self._options, self._rewards = options, resources.build_reward_manager([options.reward])

    async def __call__(self, batch: Batch) -> None:
        if self._options.otherwise == "penalty":
            init_reward_part(batch)
        for group in [own for source in self._options.handles for own in batch.groups(source).values()]:
            for experience, result in zip(group, await score_group(self._rewards, batch, group), strict=True):
                value = result.reward
                log_reward_detail(experience, f"pipeline/{batch.operator}/value", value)
                if value is None or is_undecided(result, [self._options.reward]):
                    batch.note("not checked")
                elif value < self._options.at_least:
                    self._refuse(batch, experience)

    def close(self) -> None:
        """Stop the processes of its rewards."""
        self._rewards.close()

    def _refuse(self, batch: Batch, experience: Experience) -> None:
        if self._options.otherwise == "drop":
            batch.drop(experience, "refused")
        else:
            add_reward(batch, experience, -self._options.penalty, "penalised")


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


def _hash_uniform(text: str) -> float:
    """A pseudo-random number from 0 to 1 that depends only on the text."""
    return int.from_bytes(sha256(text.encode(errors="surrogatepass")).digest()[:8]) / 2**64
