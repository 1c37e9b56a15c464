"""SFT with importance sampling: imitation with each token weighted by its probability under the policy.

L = 1/sum_i T_i sum_i sum_t -sg(p) log p,   p = pi of the demonstrated token

The ratio of the policy to the expert, whose own probability is assumed to be 1, turns imitation into the gradient of a
reward on the policy's own tokens: CHORD's L_SFT-IS, also known as dynamic fine-tuning (DFT, arXiv:2508.05629).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.recipes.sft import SFT


class SFTImportance(SFT):
    """Supervised fine-tuning with each token weighted by the policy's probability of it."""

    source: ClassVar[str] = "arXiv:2508.11408"

    name: Literal["sft_is"] = "sft_is"  # type: ignore[assignment]
