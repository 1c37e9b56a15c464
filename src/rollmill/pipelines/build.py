"""From the run file's `pipeline` to operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollmill.config.operators import OperatorSection, RewardFilter
from rollmill.config.rewards import RewardConfig
from rollmill.pipelines.pipeline import Operator, Pipeline
from rollmill.pipelines.user import made
from rollmill.rewards import Judge


@dataclass(frozen=True, slots=True)
class Resources:
    """What operators need that only the run can give."""

    build_judge: Callable[[Sequence[RewardConfig]], Judge]  #: a judge of further rewards; the operator closes it
    seed: int


def build_pipeline(sections: Sequence[OperatorSection], resources: Resources) -> Pipeline:
    """The pipeline of a stage."""
    return Pipeline([(section.name, build_operator(section, resources)) for section in sections])


def build_operator(section: OperatorSection, resources: Resources) -> Operator:
    """The operator that a section describes."""
    if type(section).function is not None:
        operator: Operator = made(section)
        return operator
    match section:
        case RewardFilter():
            from rollmill.pipelines.filters import reward_filter

            return reward_filter(section)
    raise AssertionError(f"no operator is built from {type(section).__name__}")
