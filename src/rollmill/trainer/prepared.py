"""A batch as the updates on it need it: tokens, precomputed scores and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmill.algorithms.recipe import Recipe
from rollmill.trainer.batch import TokenTable
from rollmill.trainer.coefficients import LossCoefficients
from rollmill.trainer.critic import value_metrics
from rollmill.trainer.loss import BatchAdvantages, PrecomputedScores, StepLoss
from rollmill.trainer.update import MiniBatch
from rollmill.types import Experience


@dataclass
class PreparedBatch:
    """A batch of experiences before its updates. A is its number of action tokens."""

    experiences: Sequence[Experience]
    version: int  #: of the weights before the first update
    table: TokenTable
    scores: PrecomputedScores
    advantages: BatchAdvantages
    fresh: Tensor  #: bool [A], sampled with the weights of the next update

    @property
    def tokens(self) -> int:
        return len(self.table.target)

    def mini_batch(
        self, part: list[int], recipe: Recipe, coefficients: LossCoefficients, step: int, draws: torch.Generator
    ) -> MiniBatch:
        """Builds the update of training step `step` on the experiences `part`."""
        objective = StepLoss(
            recipe,
            self.table,
            self.advantages,
            self.scores,
            part,
            step=step,
            version=self.version,
            kl_coefficient=coefficients.kl,
            entropy_coefficient=coefficients.entropy,
        )
        return MiniBatch(self.experiences, self.table, objective, part, step, self.fresh, draws)

    def set_token_details(self, details_2A: Tensor) -> None:
        """Sets each experience's `trainer_logprobs` and `entropy`, from TokenMetrics.token_details.

        Experiences that no pass has seen keep None.
        """
        values = details_2A.cpu().numpy()
        for i, experience in enumerate(self.experiences):
            own = values[:, self.table.offsets[i] : self.table.offsets[i + 1]]
            if not np.isnan(own).all():
                experience.trainer_logprobs, experience.entropy = (
                    self.table.place(i, experience, each) for each in own
                )

    def value_metrics(self) -> dict[str, float]:
        """Returns the critic's metrics on the rollouts that count; nothing without a critic."""
        if self.scores.values is None or self.advantages.returns is None:
            return {}
        rollouts = ~self.table.imitated & self.advantages.counted[self.table.experience]
        return value_metrics(self.scores.values, self.advantages.returns, rollouts)
