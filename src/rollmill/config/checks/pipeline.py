"""Checks of `pipeline`: operators that conflict with the stage or with each other."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.config.algorithm import PolicyGradientOptions
from rollmill.config.checks.conflicts import Conflict, reward_conflicts
from rollmill.config.operators.base import OperatorSection, RewardOperatorSection
from rollmill.config.operators.filters import (
    InvalidRewardFilter,
    VerifyOperator,
)
from rollmill.config.operators.shaping import (
    OverlongPenalty,
    ReplayPriority,
    SuccessRateOperator,
)
from rollmill.config.rewards.base import reward_part_names
from rollmill.config.rewards.code import CodeReward
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath


def pipeline_conflicts(stage: StageConfig) -> Iterator[Conflict]:
    """Yields key paths within the stage, each with the problem and a remedy."""
    if not stage.algorithm.uses_rollouts:
        return
    for index, operator in enumerate(stage.pipeline):
        at = ("pipeline", index)
        for key, rewards in operator.reward_lists:
            yield from reward_conflicts(stage, rewards, (*at, *key))
        if isinstance(operator, RewardOperatorSection):
            yield from _part(stage, operator, at)
        yield from _compared(stage, operator, at)
        yield from _advantage(stage, operator, at)
        if isinstance(operator, InvalidRewardFilter) and "timeout" in operator.outcomes:
            yield from _slow_code(stage, at)
        if isinstance(operator, OverlongPenalty):
            yield from _overlong(stage, operator, at)
        if isinstance(operator, ReplayPriority):
            yield from _priority(stage, at)
        if isinstance(operator, SuccessRateOperator):
            yield from _late(stage, index, at)


def _part(stage: StageConfig, operator: RewardOperatorSection, at: KeyPath) -> Iterator[Conflict]:
    """Checks that a part is one of the stage's rewards, with the same weight."""
    if operator.part is None:
        return
    names, name = reward_part_names(stage.rewards), operator.part.partition("/")[0]
    if name not in names:
        known = f"there are {', '.join(names)}" if names else "there is none at all"
        yield (*at, "part"), f"no reward `{name}`; {known}"
    elif isinstance(operator, VerifyOperator):
        reward = stage.rewards[names.index(name)]
        weight = reward.weight
        if reward.after_steps:
            text = f"reward `{name}` counts after {reward.after_steps} steps, and `verify` cannot tell before and after"
            yield (*at, "part"), f"{text}; verify the sum, or remove after_steps"
        if weight != operator.weight:
            text = f"reward `{name}` has weight {weight:g}, and `verify` would take it for {operator.weight:g}"
            yield (*at, "weight"), f"{text}; give weight: {weight:g}"


def _compared(stage: StageConfig, operator: OperatorSection, at: KeyPath) -> Iterator[Conflict]:
    if operator.compares_completions and stage.rollout.group_size == 1:
        text = f"`{operator.name}` compares the completions of a group, and rollout.group_size is 1"
        yield (*at, "name"), f"{text}; raise that, or remove this"


def _advantage(stage: StageConfig, operator: OperatorSection, at: KeyPath) -> Iterator[Conflict]:
    algorithm = stage.algorithm
    if not isinstance(algorithm, PolicyGradientOptions):
        return
    advantage = algorithm.advantage
    whole = isinstance(operator, VerifyOperator) and operator.part is None and operator.otherwise == "replace"
    if advantage.uses_parts and (whole or operator.rewrites_rewards):
        text = f"advantage `{advantage.name}` sees the parts of the reward, and `{operator.name}` changes their sum"
        yield (*at, "name"), text + ("; say which part it verifies" if whole else "; remove it")
    if advantage.uses_greedy and operator.adds_to_rewards:
        text = f"advantage `{advantage.name}` compares with a greedy completion, whose reward `{operator.name}` would"
        yield (*at, "name"), f"{text} not reach; use a reward of the run file instead"


def _slow_code(stage: StageConfig, at: KeyPath) -> Iterator[Conflict]:
    if any(isinstance(reward, CodeReward) for reward in stage.rewards):
        text = "`timeout` of the reward `code` says that a program was too slow, and such failures would be dropped"
        yield (*at, "outcomes"), f"{text}; give outcomes: [late]"


def _overlong(stage: StageConfig, operator: OverlongPenalty, at: KeyPath) -> Iterator[Conflict]:
    longest = operator.longest or stage.rollout.max_new_tokens
    if operator.buffer is not None and operator.buffer > longest:
        yield (*at, "buffer"), f"{operator.buffer} is above rollout.max_new_tokens ({longest}); lower it"
    if isinstance(stage.algorithm, PolicyGradientOptions) and stage.algorithm.overlong_buffer:
        text = "algorithm.overlong_buffer takes the same penalty off, so it would count twice; remove one of them"
        yield (*at, "name"), text


def _priority(stage: StageConfig, at: KeyPath) -> Iterator[Conflict]:
    replay = stage.buffer.replay
    if replay is None or replay.order != "priority" or replay.priority != "given":
        text = "priorities matter only with buffer.replay of order `priority` and priority `given`"
        yield (*at, "name"), f"{text}; add that, or remove this"


def _late(stage: StageConfig, index: int, at: KeyPath) -> Iterator[Conflict]:
    """Checks that success rates are measured before filters, which would distort them."""
    before = [each.name for each in stage.pipeline[:index] if each.drops_completions]
    if before:
        text = f"`{before[0]}` comes first, so the rate is that of the completions it leaves"
        yield (*at, "name"), f"{text}; put `success_rate` before it"
