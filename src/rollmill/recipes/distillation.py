"""On-policy distillation: the policy rolls out, a teacher gives its next-token distribution at every position.

L = 1/sum_i T_i sum_i sum_t D_t over the policy's own tokens; D_t a divergence between the next-token distributions:
reverse_kl   KL(policy || teacher), mode-seeking
forward_kl   KL(teacher || policy), mode-covering
jsd          beta KL(teacher || m) + (1 - beta) KL(policy || m), m = beta teacher + (1 - beta) policy
             forward_kl at beta 0, reverse_kl at beta 1
sampled      -sg(log teacher - log policy) log policy of the sampled token: reverse_kl's gradient from one token
sampled_jsd  -sg((1 - beta) (log m - log policy)) log policy of the sampled token: jsd's gradient from one token
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.algorithm import Aggregation, AlgorithmOptions


class DistillationOptions(AlgorithmOptions):
    """Options of algorithms in which a teacher corrects the policy's own completions, token by token."""

    needs_rewards: ClassVar[bool] = False

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled", "sampled_jsd"] = "reverse_kl"
    """Divergence minimised at every position."""
    beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture. 0 is the forward KL, 1 the reverse KL. Only with `jsd` and
    `sampled_jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Softens both distributions. Not with `sampled` and `sampled_jsd`."""
    aggregation: Aggregation = "token-mean"
    """Aggregation of per-token terms; each has one denominator for the whole optimizer step."""


class Distill(DistillationOptions):
    """On-policy distillation from a teacher with the same vocabulary. Rewards are reported but not used."""

    source: ClassVar[str] = "arXiv:2306.13649"

    name: Literal["distill"] = "distill"
    teacher: Path | None = None
    """Checkpoint folder of the teacher; required."""
