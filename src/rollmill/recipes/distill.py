"""On-policy distillation: the policy rolls out, a teacher says at every position what it would have done.

L = 1/sum_i T_i sum_i sum_t D_t over the policy's own tokens; D_t a divergence between the next-token distributions:
reverse_kl   KL(policy || teacher), seeks modes
forward_kl   KL(teacher || policy), covers modes
jsd          beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy
sampled      -sg(log teacher - log policy) log policy of the sampled token: reverse_kl's gradient from one token
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.algorithm import Aggregation, AlgorithmOptions


class Distill(AlgorithmOptions):
    """On-policy distillation from a teacher with the same vocabulary. Rewards are not needed, but shown."""

    needs_rewards: ClassVar[bool] = False
    source: ClassVar[str] = "arXiv:2306.13649"

    name: Literal["distill"] = "distill"
    teacher: Path | None = None
    """Checkpoint folder of the teacher; has to be given."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled"] = "reverse_kl"
    """What is minimised at every position."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture. Only with `jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Softens both distributions. Not with `sampled`."""
    aggregation: Aggregation = "token-mean"
    """How per-token terms become one number; each has one denominator for the whole optimizer step."""
