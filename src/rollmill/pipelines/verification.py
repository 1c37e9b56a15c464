"""Operators that judge completions again, by further rewards."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from rollmill.config.operators import CheckOperator, VerifyOperator
from rollmill.config.rewards import CodeReward, RewardSection
from rollmill.config.rewards.names import reward_part_names
from rollmill.pipelines.batch import Batch, reward_value, to_completion
from rollmill.pipelines.reward_updates import RAW_REWARD, add_reward, init_reward_part, log_reward_detail, set_reward
from rollmill.rewards import RewardManager, RewardResult
from rollmill.rewards.base import GATED, LATE, TIMEOUT
from rollmill.types import Experience, Task


class RewardVerifier:
    """Acts where independent rewards disagree with what a completion earned.

    What they cannot judge stays as it is, and so does what a closed gate kept from being judged.
    """

    def __init__(self, options: VerifyOperator, judge: RewardManager, seed: int) -> None:
        self._options, self._judge, self._seed = options, judge, seed

    async def __call__(self, batch: Batch) -> None:
        added = {"replace": self._options.part is None, "penalty": True, "drop": False}
        if added[self._options.otherwise]:
            init_reward_part(batch)
        for group in batch.groups().values():
            chosen = [each for each in group if self._is_chosen(each)]
            for experience, judgement in zip(chosen, await score_group(self._judge, batch, chosen), strict=True):
                self._compare(batch, experience, judgement)

    def close(self) -> None:
        """End the processes of its judge."""
        self._judge.close()

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
        return _place(f"{self._seed}:{experience.id}") < options.share

    def _compare(self, batch: Batch, experience: Experience, judgement: RewardResult) -> None:
        verdict, before = judgement.reward, reward_value(experience, self._options.part)
        for name, value in judgement.parts.items():
            log_reward_detail(experience, f"pipeline/{batch.operator}/{name}", value)
        if verdict is None or is_undecided(judgement, self._options.rewards):
            batch.note("not verified")
        elif before is not None and abs(verdict - before) <= self._options.tolerance:
            batch.note("confirmed")
        elif self._options.otherwise == "drop":
            batch.drop(experience, "refuted")
        elif self._options.otherwise == "penalty":
            add_reward(batch, experience, -self._options.penalty, "penalised")
        else:
            self._replace(batch, experience, before, verdict)

    def _replace(self, batch: Batch, experience: Experience, before: float | None, verdict: float) -> None:
        part = self._options.part
        if part is None:
            set_reward(batch, experience, verdict, "replaced")
            return
        experience.info.setdefault(RAW_REWARD, experience.reward)
        experience.info.setdefault("raw_parts", {})[part] = before
        experience.reward_parts[part] = verdict
        if experience.reward is not None or before is None:  # a part may be there and not count yet
            experience.reward = (experience.reward or 0.0) + self._options.weight * (verdict - (before or 0.0))
        batch.change(experience, "replaced")


class RewardChecker:
    """Drops or penalises completions that a reward does not find good enough."""

    def __init__(self, options: CheckOperator, judge: RewardManager) -> None:
        self._options, self._judge = options, judge

    async def __call__(self, batch: Batch) -> None:
        if self._options.otherwise == "penalty":
            init_reward_part(batch)
        for group in batch.groups().values():
            for experience, judgement in zip(group, await score_group(self._judge, batch, group), strict=True):
                value = judgement.reward
                log_reward_detail(experience, f"pipeline/{batch.operator}/value", value)
                if value is None or is_undecided(judgement, [self._options.reward]):
                    batch.note("not checked")
                elif value < self._options.at_least:
                    self._refuse(batch, experience)

    def close(self) -> None:
        """End the processes of its judge."""
        self._judge.close()

    def _refuse(self, batch: Batch, experience: Experience) -> None:
        if self._options.otherwise == "drop":
            batch.drop(experience, "refused")
        else:
            add_reward(batch, experience, -self._options.penalty, "penalised")


async def score_group(
    judge: RewardManager, batch: Batch, experiences: Sequence[Experience], *, task: Task | None = None
) -> list[RewardResult]:
    """Judgements of experiences of one group, by their task or another one."""
    if not experiences:
        return []
    task = task or batch.context.task(experiences[0].task_id)
    return await judge.judge_group(task, [to_completion(each, index) for index, each in enumerate(experiences)])


def is_undecided(judgement: RewardResult, rewards: Sequence[RewardSection]) -> bool:
    """Whether some reward took too long, so that what it gave is no verdict. Code that is too slow is one."""
    programs = {
        name for name, each in zip(reward_part_names(rewards), rewards, strict=True) if isinstance(each, CodeReward)
    }
    return any(
        outcome == LATE or (outcome == TIMEOUT and name not in programs) for name, outcome in judgement.outcomes.items()
    )


def _place(text: str) -> float:
    """A number from 0 to 1 that only depends on the text."""
    return int.from_bytes(sha256(text.encode(errors="surrogatepass")).digest()[:8]) / 2**64
