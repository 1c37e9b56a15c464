"""Pass@k training: GRPO for the best of k completions, in closed form over all subsets of k of the group.

R_S = best reward of the subset S
A_i = (mean of R_S over the S with i - mean of R_S) / (std of R_S + eps)
L = 1/sum_i T_i sum_i sum_t -min(rho A_i, clip(rho) A_i)

With rewards of 0 and 1 these are the advantages that the paper derives in closed form. `advantage: {baseline: others,
scale: none}` with `aggregation: sequence-sum-mean` is 1 / k times an unbiased estimate of the gradient of pass@k (PKPO,
arXiv:2505.15201). k of the whole group with `{baseline: others, scale: group}` is verl's `grpo_passk`
(arXiv:2503.19595).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.advantage import AdvantageConfig, PassAtKAdvantage
from rollmill.config.algorithm import PolicyGradientOptions


class PassAtKTraining(PolicyGradientOptions):
    """Pass@k training: advantages of the best of k completions."""

    source: ClassVar[str] = "arXiv:2508.10751"

    name: Literal["pass_at_k"] = "pass_at_k"
    advantage: AdvantageConfig = PassAtKAdvantage()
