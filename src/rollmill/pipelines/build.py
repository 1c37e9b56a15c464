"""Builds the operators of the run file's `pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rollmill.config import operators as config
from rollmill.config.rewards import RewardConfig
from rollmill.pipelines import filters, shaping, synthesis
from rollmill.pipelines.pipeline import Operator, Pipeline, build_custom_operator
from rollmill.rewards import RewardManager


@dataclass(frozen=True, slots=True)
class PipelineResources:
    """Resources of the run that operators need."""

    build_reward_manager: Callable[[Sequence[RewardConfig]], RewardManager]
    """Builds further rewards; the operator closes them."""
    seed: int


def build_pipeline(sections: Sequence[config.OperatorSection], resources: PipelineResources) -> Pipeline:
    """Build the pipeline of a stage.

    Raises ConfigError if an operator needs a package that is not installed, and errors of building rewards.
    """
    with ExitStack() as made_so_far:
        operators = []
        for section in sections:
            operator = build_operator(section, resources)
            if hasattr(operator, "close"):
                made_so_far.callback(operator.close)
            operators.append((section.name, operator))
        made_so_far.pop_all()
    return Pipeline(operators)


def build_operator(section: config.OperatorSection, resources: PipelineResources) -> Operator:
    """Build the operator of a section. Imports libraries here, so that a run loads only those it uses."""
    if type(section).function is not None:
        operator: Operator = build_custom_operator(section)
        return operator
    match section:
        case config.RewardFilter():
            return filters.reward_filter(section)
        case config.LengthFilter():
            return filters.length_filter(section)
        case config.GroupVarianceFilter():
            return filters.group_variance(section)
        case config.InvalidRewardFilter():
            return filters.invalid_reward(section)
        case config.TruncationOperator():
            return filters.truncated(section)
        case config.LengthShaping():
            return shaping.length_reward(section)
        case config.OverlongPenalty():
            return shaping.overlong_penalty(section)
        case config.RepetitionPenalty():
            return shaping.repetition_penalty(section)
        case config.DiversityBonus():
            return shaping.diversity(section)
        case config.RewardScaling():
            return shaping.scale(section)
        case config.ReplayPriority():
            return shaping.priority(section)
        case config.SuccessRateOperator():
            return shaping.success_rate(section)
        case config.DemonstrationOperator():
            return synthesis.DemonstrationMaker(section)
        case config.PreferencePairOperator():
            return synthesis.preference_pairs(section)
    return _build_heavy(section, resources)


def _build_heavy(section: config.OperatorSection, resources: PipelineResources) -> Operator:
    """Build an operator that needs rewards or further libraries."""
    match section:
        case config.VerifyOperator():
            from rollmill.pipelines.verification import RewardVerifier

            return RewardVerifier(section, resources.build_reward_manager(section.rewards), resources.seed)
        case config.CheckOperator():
            from rollmill.pipelines.verification import RewardChecker

            return RewardChecker(section, resources.build_reward_manager([section.reward]))
        case config.DuplicatesOperator():
            from rollmill.pipelines.deduplication import DuplicateFilter

            return DuplicateFilter(section)
        case config.NearDuplicatesOperator():
            from rollmill.pipelines.deduplication import NearDuplicateFilter

            return NearDuplicateFilter(section)
        case config.ReflectionOperator():
            from rollmill.pipelines.synthesis import reflection

            return reflection(section)
        case config.GeneratedTestsOperator():
            from rollmill.pipelines.generated_tests import TestGenerator

            return TestGenerator(section, resources.build_reward_manager([section.code]))
        case config.DataJuicerFilter():
            from rollmill.pipelines.data_juicer import DataJuicerOperators

            return DataJuicerOperators(section)
    raise AssertionError(f"no operator is built from {type(section).__name__}")
