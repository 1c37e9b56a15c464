"""On-policy distillation by the generalised Jensen-Shannon divergence.

L = 1/sum_i T_i sum_i sum_t D_t over the policy's own tokens; m = beta teacher + (1 - beta) policy
jsd          D_t = beta KL(teacher || m) + (1 - beta) KL(policy || m); forward KL at beta 0, reverse KL at beta 1
sampled_jsd  D_t = -sg((1 - beta) (log m - log policy)) log policy of the sampled token: the same gradient on average

The second is a policy gradient, like Trinity-RFT's `jsd`. That one uses the sampled token's share of the divergence as
the reward, whose expected gradient is not the divergence's; with log m - log policy as the reward, it is.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.recipes.distillation import Distill


class JSD(Distill):
    """On-policy distillation from a teacher by the generalised Jensen-Shannon divergence."""

    source: ClassVar[str] = "arXiv:2306.13649"

    name: Literal["jsd"] = "jsd"  # type: ignore[assignment]
    divergence: Literal["jsd", "sampled_jsd"] = "jsd"
    """Over the whole vocabulary, or for the sampled token only."""
