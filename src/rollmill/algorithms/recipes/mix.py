"""MIX (Trinity-RFT, arXiv:2505.17826): (1 - mu) L_grpo(usual) + mu L_sft(expert), each with its own denominator.

The published documents state L_grpo + mu L_sft, the published code (1 - mu) and mu; this is the convex form. L_grpo is
the whole GRPO loss (surrogate, KL penalty, entropy bonus); L_sft is a token mean.
"""

from __future__ import annotations

from dataclasses import replace

from rollmill.algorithms.recipe import Recipe
from rollmill.algorithms.recipes import grpo, sft
from rollmill.algorithms.recipes.policy import policy_terms
from rollmill.config.algorithm import MIXOptions


def build(options: MIXOptions, max_new_tokens: int) -> Recipe:
    """The recipe under `options`."""
    usual = policy_terms(options, max_new_tokens, share=1 - options.mu)
    expert = sft.expert_term("token-mean", max_new_tokens, weight=options.mu)
    return replace(grpo.build(options, max_new_tokens), name="mix", terms=(*usual, expert))
