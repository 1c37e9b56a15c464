"""Operators that shape rewards (added as the part `pipeline/NAME`), set replay priorities and report success rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.operators import OperatorSection, RewardOperatorSection, SuccessOperatorSection
from rollmill.pipelines.batch import Batch, is_success, response_ids, response_length, reward_value, rollouts_of
from rollmill.pipelines.builtin.deduplication import normalize_whitespace
from rollmill.pipelines.reward_updates import add_reward, init_reward_part, set_reward
from rollmill.rewards.base import find_answer
from rollmill.rewards.builtin.length import kimi_length_scores, soft_overlong_penalty
from rollmill.rewards.builtin.repetition import repetition_share
from rollmill.types import Experience, first_per_rollout, split_by_role

if TYPE_CHECKING:
    from rollmill.config.run import StageConfig


class LengthShaping(SuccessOperatorSection):
    """Length reward within a group: shorter is better, and failures never gain (Kimi k1.5).

    From .5 for the shortest to -.5 for the longest completion, at most 0 for failures.
    """

    adds_to_rewards: ClassVar[bool] = True

    compares = True
    name: Literal["length_reward"] = "length_reward"
    weight: float = 1.0
    """Factor of the added reward."""
    warmup_steps: int = Field(0, ge=0)
    """Number of initial training steps without effect."""

    def __call__(self, batch: Batch) -> None:
        """Add `kimi_length_scores` within each group; experiences without a reward do not count."""
        if batch.context.version < self.warmup_steps:
            batch.note("warm-up")
            return
        init_reward_part(batch)
        for group in batch.compared():
            known = [each for each in group if reward_value(each, None) is not None]
            correct = [is_success(each, self.part, self.threshold) for each in known]
            shares = kimi_length_scores([response_length(each) for each in known], correct) if known else []
            for experience, share in zip(known, shares, strict=True):
                add_reward(batch, experience, self.weight * (share or 0.0), "shaped")


class OverlongPenalty(OperatorSection):
    """Soft overlong penalty: 0, then falling to -1 over the last `buffer` tokens before `longest` (DAPO)."""

    adds_to_rewards: ClassVar[bool] = True

    name: Literal["overlong_penalty"] = "overlong_penalty"
    longest: int | None = Field(None, ge=1)
    """Maximum length in tokens (L_max). Default: rollout.max_new_tokens."""
    buffer: int | None = Field(None, ge=1)
    """Number of tokens over which the penalty grows (L_cache). Default: a fifth of `longest`, as published."""
    weight: float = Field(1.0, ge=0)
    """Factor of the penalty."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.longest is not None and self.buffer is not None and self.buffer > self.longest:
            raise ValueError(f"buffer ({self.buffer}) is above longest ({self.longest}); lower it")
        return self

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        longest = self.longest or stage.rollout.max_new_tokens
        if self.buffer is not None and self.buffer > longest:
            yield "buffer", f"{self.buffer} is above rollout.max_new_tokens ({longest}); lower it"
        if isinstance(stage.algorithm, PolicyGradientOptions) and stage.algorithm.overlong_buffer:
            text = "algorithm.overlong_buffer takes the same penalty off, so it would count twice"
            yield "name", f"{text}; remove one of them"

    def __call__(self, batch: Batch) -> None:
        longest = self.longest or batch.context.max_new_tokens
        buffer = self.buffer or max(longest // 5, 1)
        init_reward_part(batch)
        for experience in _scored(batch):
            penalty = soft_overlong_penalty(response_length(experience), longest, buffer)
            add_reward(batch, experience, self.weight * penalty, "shaped")


class RepetitionPenalty(OperatorSection):
    """Penalty down to -1 for the fraction of repeated n-grams, or the fraction of the text in a loop at its end."""

    adds_to_rewards: ClassVar[bool] = True

    name: Literal["repetition_penalty"] = "repetition_penalty"
    ngram: int = Field(8, ge=1)
    """Length of an n-gram in tokens."""
    free: float = Field(0.0, ge=0, lt=1)
    """Fraction without a penalty; the rest is scaled to reach -1."""
    loop_times: int = Field(4, ge=2)
    """Minimum number of consecutive repeats of a loop at the end."""
    loop_tokens: int = Field(32, ge=2)
    """Minimum number of tokens of all repeats together."""
    weight: float = Field(1.0, ge=0)
    """Factor of the penalty."""

    def __call__(self, batch: Batch) -> None:
        init_reward_part(batch)
        for experience in _scored(batch):
            penalty, _ = repetition_share(
                response_ids(experience), self.ngram, self.free, self.loop_times, self.loop_tokens
            )
            add_reward(batch, experience, -self.weight * penalty, "shaped")


class DiversityBonus(SuccessOperatorSection):
    """Bonus from 0 to 1 for successes that differ from the other completions of their group."""

    adds_to_rewards: ClassVar[bool] = True

    compares = True
    name: Literal["diversity"] = "diversity"
    by: Literal["ngrams", "answer"] = "ngrams"
    """`ngrams`: mean Jaccard distance of n-grams to the other completions. `answer`: fraction of the other completions
    with a different answer."""
    ngram: int = Field(4, ge=1)
    """Length of an n-gram in tokens. Only with `by: ngrams`."""
    after: str | None = None
    """The answer is what follows the last occurrence of this text. Default: all of the text without reasoning. Only
    with `by: answer`."""
    weight: float = Field(0.1, ge=0)
    """Factor of the bonus."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        self.reject_unused_keys(("ngram",), self.by == "ngrams", "with by: ngrams")
        self.reject_unused_keys(("after",), self.by == "answer", "with by: answer")
        return self

    def __call__(self, batch: Batch) -> None:
        init_reward_part(batch)
        for group in batch.compared():
            for experience, distance in zip(group, self._distances(group), strict=True):
                scored = reward_value(experience, None) is not None
                good = scored and is_success(experience, self.part, self.threshold)
                add_reward(batch, experience, self.weight * distance if good else 0.0, "shaped")

    def _distances(self, group: Sequence[Experience]) -> list[float]:
        """Mean distance of each completion to the others, from 0 to 1; 0 for a group of one."""
        if len(group) < 2:
            return [0.0] * len(group)
        if self.by == "answer":
            found = [find_answer(each, self.after) for each in group]
            answers = ["" if each is None else normalize_whitespace(each) for each in found]
            return [1 - (answers.count(own) - 1) / (len(group) - 1) for own in answers]
        sets = [_ngrams(response_ids(each).tolist(), self.ngram) for each in group]
        sums = [sum(1 - len(own & other) / len(own | other) for other in sets) for own in sets]
        return [total / (len(group) - 1) for total in sums]


def _ngrams(ids: list[int], n: int) -> set[tuple[int, ...]]:
    """The n-grams; all tokens as one if there are fewer than n."""
    return {tuple(ids[start : start + n]) for start in range(max(len(ids) - n, 0) + 1)}


class RewardScaling(OperatorSection):
    """reward * factor + offset, then clipped."""

    adds_to_rewards: ClassVar[bool] = True
    rewrites_rewards: ClassVar[bool] = True

    name: Literal["scale"] = "scale"
    factor: float = 1.0
    """Multiplies the reward."""
    offset: float = 0.0
    """Added after multiplying."""
    clip: tuple[float, float] | None = None
    """Lower and upper bound of the result."""

    @model_validator(mode="after")
    def _changes(self) -> Self:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: the lower bound {self.clip[0]:g} is above the upper {self.clip[1]:g}")
        if (self.factor, self.offset, self.clip) == (1.0, 0.0, None):
            raise ValueError("changes nothing; give factor, offset or clip")
        return self

    def __call__(self, batch: Batch) -> None:
        init_reward_part(batch)
        for experience in _scored(batch):
            assert experience.reward is not None
            value = experience.reward * self.factor + self.offset
            if self.clip is not None:
                value = min(max(value, self.clip[0]), self.clip[1])
            set_reward(batch, experience, value, "scaled")


def _scored(batch: Batch) -> list[Experience]:
    return [experience for experience in rollouts_of(batch) if reward_value(experience, None) is not None]


# Replay priority and success rate


class ReplayPriority(RewardOperatorSection):
    """Sets the replay priority of a group (`buffer.replay`, order `priority`)."""

    name: Literal["priority"] = "priority"
    by: Literal["variance", "balance", "reward", "failure", "length", "recency"] = "variance"
    """`variance` of the rewards, or p (1 - p) for rewards of 0 and 1. `balance`: 1 - 2 |mean - 0.5|. `reward`: their
    mean. `failure`: 1 - mean. `length`: mean length / max_new_tokens. `recency`: the training step."""
    threshold: float | None = None
    """Use successes instead of rewards: 1 for at least this, else 0."""
    floor: float = Field(0.01, ge=0)
    """Minimum priority. Groups with priority 0 are never replayed."""

    @model_validator(mode="after")
    def _honoured(self) -> Self:
        rewarded = self.by not in ("length", "recency")
        self.reject_unused_keys(("part", "threshold"), rewarded, "by those that look at rewards, not by: " + self.by)
        return self

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        replay = stage.buffer.replay
        if replay is None or replay.order != "priority" or replay.priority != "given":
            text = "priorities matter only with buffer.replay of order `priority` and priority `given`"
            yield "name", f"{text}; add that, or remove this"

    def __call__(self, batch: Batch) -> None:
        """Set `info["priority"]` of every rollout to the priority of its group, with roles to the mean of theirs."""
        for group in batch.groups().values():
            own = [self._priority(each, batch) for each in split_by_role(group)]
            value = max(float(np.mean(own)), self.floor)
            for experience in group:
                experience.info["priority"] = value
            batch.note("set")

    def _priority(self, group: Sequence[Experience], batch: Batch) -> float:
        if self.by == "length":
            return float(np.mean([response_length(each) for each in group])) / batch.context.max_new_tokens
        if self.by == "recency":
            return float(batch.context.step)
        found: list[float | None]
        if self.threshold is None:
            found = [reward_value(each, self.part) for each in first_per_rollout(group)]
        else:
            found = [is_success(each, self.part, self.threshold) for each in first_per_rollout(group)]
        rewards = [float(reward) for reward in found if reward is not None]
        if not rewards:
            return 0.0
        mean = float(np.mean(rewards))
        values = {
            "variance": float(np.var(rewards)),
            "balance": 1 - 2 * abs(mean - 0.5),
            "reward": mean,
            "failure": 1 - mean,
        }
        return values[self.by]


class SuccessRateOperator(SuccessOperatorSection):
    """Reports which completions are successes to samplers that choose tasks by success rate. Put it before filters.

    Without it, samplers use the rewards of all completions, clipped to 0 and 1.
    """

    name: Literal["success_rate"] = "success_rate"

    def stage_conflicts(self, stage: StageConfig) -> Iterator[tuple[str, str]]:
        """Refuses filters before it, which would distort the rates."""
        before = [each for each in takewhile(lambda each: each is not self, stage.pipeline) if each.drops_completions]
        if before:
            text = f"`{before[0].name}` comes first, so the rate is that of the completions it leaves"
            yield "name", f"{text}; put `success_rate` before it"

    def __call__(self, batch: Batch) -> None:
        """Report the successes of each task; of several roles, those of the first that has successes and failures."""
        for group in batch.groups().values():
            by_role = []
            for own in split_by_role(group):
                known = [is_success(each, self.part, self.threshold) for each in first_per_rollout(own)]
                by_role.append([float(success) for success in known if success is not None])
            if successes := max(by_role, key=lambda own: len(set(own))):
                batch.context.observe(group[0].task_id, successes)
                batch.note("observed")
