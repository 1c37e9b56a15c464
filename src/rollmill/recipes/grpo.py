"""GRPO: clipped surrogate on group-normalised rewards.

A_i = (r_i - mean) / (std + eps) within the group
L = 1/N sum_i 1/T_i sum_t [-min(rho A_i, clip(rho) A_i) + kl k3], N completions with a reward of the optimizer step
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import Aggregation, PolicyGradientOptions


class GRPO(PolicyGradientOptions):
    """Group-relative policy optimisation: rewards normalised within the group, mean over completions of token means."""

    source: ClassVar[str] = "arXiv:2402.03300"

    name: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "sequence-mean"
