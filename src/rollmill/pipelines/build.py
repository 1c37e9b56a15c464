"""From the run file's `pipeline` to operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rollmill.config import operators as config
from rollmill.config.rewards import RewardConfig
from rollmill.pipelines import filters, shaping, signals, synthesis
from rollmill.pipelines.pipeline import Operator, Pipeline
from rollmill.pipelines.user import made
from rollmill.rewards import Judge


@dataclass(frozen=True, slots=True)
class Resources:
    """What operators need that only the run can give."""

    build_judge: Callable[[Sequence[RewardConfig]], Judge]  #: a judge of further rewards; the operator closes it
    seed: int


def build_pipeline(sections: Sequence[config.OperatorSection], resources: Resources) -> Pipeline:
    """The pipeline of a stage.

    Raises ConfigError where an operator needs a package that is not installed, and what building a judge raises.
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


def build_operator(section: config.OperatorSection, resources: Resources) -> Operator:
    """The operator that a section describes. Libraries are imported here, so that a run pays for those it uses only."""
    if type(section).function is not None:
        operator: Operator = made(section)
        return operator
    match section:
        case config.RewardFilter():
            return filters.reward_filter(section)
        case config.LengthFilter():
            return filters.length_filter(section)
        case config.GroupVariance():
            return filters.group_variance(section)
        case config.InvalidReward():
            return filters.invalid_reward(section)
        case config.Truncated():
            return filters.truncated(section)
        case config.LengthShaping():
            return shaping.length_reward(section)
        case config.OverlongPenalty():
            return shaping.overlong_penalty(section)
        case config.RepetitionPenalty():
            return shaping.repetition_penalty(section)
        case config.Diversity():
            return shaping.diversity(section)
        case config.Scale():
            return shaping.scale(section)
        case config.Priority():
            return signals.priority(section)
        case config.SuccessRate():
            return signals.success_rate(section)
        case config.Demonstrations():
            return synthesis.Demonstrator(section)
        case config.Pairs():
            return synthesis.pairs(section)
    return _costly(section, resources)


def _costly(section: config.OperatorSection, resources: Resources) -> Operator:
    """Operators with judges or libraries of their own."""
    match section:
        case config.Verify():
            from rollmill.pipelines.checks import Verifier

            return Verifier(section, resources.build_judge(section.rewards), resources.seed)
        case config.Check():
            from rollmill.pipelines.checks import Checker

            return Checker(section, resources.build_judge([section.reward]))
        case config.Duplicates():
            from rollmill.pipelines.duplicates import DuplicateFilter

            return DuplicateFilter(section)
        case config.NearDuplicates():
            from rollmill.pipelines.near_duplicates import NearDuplicateFilter

            return NearDuplicateFilter(section)
        case config.Reflection():
            from rollmill.pipelines.reflection import reflection

            return reflection(section)
        case config.GeneratedTests():
            from rollmill.pipelines.generated_tests import TestMaker

            return TestMaker(section, resources.build_judge([section.code]))
        case config.DataJuicer():
            from rollmill.pipelines.data_juicer import DataJuicerOperators

            return DataJuicerOperators(section)
    raise AssertionError(f"no operator is built from {type(section).__name__}")
