"""Imitation of worked solutions, alone or beside reinforcement."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rollmill.config.algorithms.base import Aggregation, OfflineAlgorithmOptions
from rollmill.config.algorithms.baselines import GRPO


class SFT(OfflineAlgorithmOptions):
    """Supervised fine-tuning on the tasks' worked solutions."""

    uses_demonstrations = True
    recipe = "rollmill.algorithms.imitation_recipes:sft"
    formula = """
    Supervised fine-tuning: -log p of the demonstrations' tokens.

    L = 1/sum_i T_i sum_i sum_t -log pi over the demonstrations of the step
    """

    name: Literal["sft"] = "sft"
    aggregation: Aggregation = "token-mean"
    """Aggregation of per-token terms."""


class SFTImportance(SFT):
    """Supervised fine-tuning with each token weighted by the policy's probability of it."""

    recipe = "rollmill.algorithms.imitation_recipes:sft_importance"
    source = "arXiv:2508.11408"
    formula = """
    SFT with importance sampling: imitation with each token weighted by its probability under the policy.

    L = 1/sum_i T_i sum_i sum_t -sg(p) log p,   p = pi of the demonstrated token

    The ratio of the policy to the expert, whose own probability is assumed to be 1, turns imitation into the gradient
    of a reward on the policy's own tokens: CHORD's L_SFT-IS, also known as dynamic fine-tuning (DFT, arXiv:2508.05629).
    """

    name: Literal["sft_is"] = "sft_is"  # type: ignore[assignment]


class SFTPhi(SFT):
    """Supervised fine-tuning with each token weighted by p (1 - p)."""

    recipe = "rollmill.algorithms.imitation_recipes:sft_phi"
    source = "arXiv:2508.11408"
    formula = """
    SFT with CHORD's phi function: low weight for tokens with a probability near 0 or 1.

    L = 1/sum_i T_i sum_i sum_t -sg(p (1 - p)) min(log p, log cutoff),   p = pi of the demonstrated token
    """

    name: Literal["sft_phi"] = "sft_phi"  # type: ignore[assignment]
    cutoff: float = Field(1.0, gt=0, le=1)
    """Tokens with a greater probability have no gradient. 1: all have one."""


class MixedOptions(GRPO):
    """Base of algorithms that learn from rollouts and demonstrations in one update."""

    uses_demonstrations = True

    aggregation: Aggregation = "sequence-mean"
    """Reduction of the rollouts' per-token terms to the loss, with one denominator for the whole optimizer step. The
    SFT term is always a token mean."""
    expert_ratio: float = Field(0.25, gt=0, lt=1)
    """Demonstrations per completion: ceil(expert_ratio x rollout.batch x rollout.group_size) join each step."""

    def demonstrations_per_step(self, rollouts: int) -> int:
        return math.ceil(self.expert_ratio * rollouts)


class MIX(MixedOptions):
    """Trinity-RFT's MIX: (1 - mu) L_grpo(rollouts) + mu L_sft(demonstrations), each with its own denominator."""

    recipe = "rollmill.algorithms.imitation_recipes:mix"
    source = "arXiv:2505.17826"
    formula = """
    MIX (Trinity-RFT): reinforcement on rollouts and imitation of demonstrations in one update.

    L = (1 - mu) L_grpo(rollouts) + mu L_sft(demonstrations), each with its own denominator

    The publication has L_grpo + mu L_sft, the published code (1 - mu) and mu; this is the convex form. L_grpo is
    the whole GRPO loss (surrogate, KL penalty, entropy bonus); L_sft is a token mean.
    """

    name: Literal["mix"] = "mix"  # type: ignore[assignment]
    mu: float = Field(0.1, ge=0, le=1)
    """Weight of the SFT term."""


class CHORD(MixedOptions):
    """CHORD: GRPO and imitation, the share of imitation rising and falling over the steps."""

    recipe = "rollmill.algorithms.imitation_recipes:chord"
    source = "arXiv:2508.11408"
    formula = """
    CHORD: MIX with a scheduled share of imitation, and lower weight for tokens with a probability near 0 or 1.

    L = (1 - mu_s) L_grpo(rollouts) + mu_s L_sft(demonstrations) at step s
    mu_s: linearly from 0 to `peak` over `warmup` steps, then along half a cosine to `valley` over `decay` steps
    L_sft = 1/sum_i T_i sum_i sum_t -sg(p (1 - p)) log p, or plain -log p
    """

    name: Literal["chord"] = "chord"  # type: ignore[assignment]
    warmup: int = Field(0, ge=0)
    """Steps over which the share of imitation rises to `peak`."""
    decay: int = Field(200, ge=1)
    """Steps over which it falls from `peak` to `valley`."""
    peak: float = Field(0.9, ge=0, le=1)
    """The maximum share."""
    valley: float = Field(0.05, ge=0, le=1)
    """The final share."""
    token_weights: bool = True
    """Weight tokens of demonstrations by p (1 - p)."""
