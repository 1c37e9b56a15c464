"""Operators that leave experiences out."""

from __future__ import annotations

from rollmill.config.operators import RewardFilter
from rollmill.pipelines.batch import Batch
from rollmill.pipelines.pipeline import Operator


def reward_filter(options: RewardFilter) -> Operator:
    """Drops usual experiences whose reward lies outside the bounds; those without one are kept."""

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            for experience in group:
                if experience.reward is None:
                    continue
                if options.at_least is not None and experience.reward < options.at_least:
                    batch.drop(experience, "reward too low")
                elif options.at_most is not None and experience.reward > options.at_most:
                    batch.drop(experience, "reward too high")

    return apply
