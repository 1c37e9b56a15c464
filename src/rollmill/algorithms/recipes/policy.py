"""Terms that the policy-gradient recipes share."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rollmill.algorithms.aggregation import aggregation
from rollmill.algorithms.corrections import truncated_importance
from rollmill.algorithms.kl import k3
from rollmill.algorithms.losses import ppo_clip
from rollmill.algorithms.recipe import Advantages, LossTerm, RewardInputs, TermInputs
from rollmill.config.algorithm import PolicyGradientOptions


def policy_terms(options: PolicyGradientOptions, max_new_tokens: int, share: float = 1.0) -> tuple[LossTerm, ...]:
    """The clipped surrogate, and KL penalty and entropy bonus where they are on, all multiplied by `share`."""
    aggregate = aggregation(options.aggregation, max_length=max_new_tokens)
    terms = [
        LossTerm("policy", partial(_surrogate, options=options), aggregate, weight=share, uses_advantage=True),
        LossTerm("kl", _kl_penalty, aggregate, weight=share * options.kl, uses_reference=True),
        LossTerm("entropy", _entropy, aggregate, weight=-share * options.entropy, uses_entropy=True),
    ]
    return tuple(term for term in terms if term.weight or term.name == "policy")


def judged(inputs: RewardInputs, values: Tensor) -> Advantages:
    """Every experience with a reward enters the denominators."""
    return Advantages(values, ~inputs.rewards.isnan())


def _surrogate(inputs: TermInputs, options: PolicyGradientOptions) -> Tensor:
    loss = ppo_clip(
        inputs.logprob,
        inputs.old_logprob,
        inputs.advantage,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    if options.importance_cap is not None:
        loss = loss * truncated_importance(inputs.old_logprob, inputs.rollout_logprob, options.importance_cap)
    return loss


def _kl_penalty(inputs: TermInputs) -> Tensor:
    assert inputs.reference_logprob is not None
    return k3(inputs.logprob, inputs.reference_logprob)


def _entropy(inputs: TermInputs) -> Tensor:
    return inputs.entropy
