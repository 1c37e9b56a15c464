"""Advantages that differ within an episode: per token (GAE) or per step of a multi-turn episode.

Shapes: T tokens or steps of S sequences, contiguous or interleaved; the rows of one sequence are in order of time. Only
action tokens are given: observation tokens have no row, so recursions skip them. Sums are in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollmill.algorithms.advantages import grpo, mean_baseline, uniform_groups
from rollmill.algorithms.advantages import whiten as whiten_values


class ValueTargets(NamedTuple):
    """Result of generalized advantage estimation, [T] each, without gradient."""

    advantages: Tensor
    returns: Tensor  #: advantage + value: the critic's target


def gae(
    values: Tensor, rewards: Tensor, sequence: Tensor, *, gamma: float = 1.0, lam: float | Tensor = 1.0
) -> ValueTargets:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), per token.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = sum_k (gamma lam)^k delta_{t+k}; the value after the last token is 0.
    If the critic uses another lambda than the policy (VC-PPO, VAPO), call this twice.

    Args:
        values: [T], V of the state in which the token was chosen.
        rewards: [T]; see `reward_at_last_token` for one reward per sequence. A sequence with a NaN gets advantage 0 and
            returns equal to its values.
        sequence: int64 [T], id of the token's sequence.
        lam: a scalar, or [S] with one per sequence, if `sequence` is 0 .. S - 1.
    """
    v, r = values.detach().double(), rewards.double()
    following = _next_token_index(sequence)
    delta = r + gamma * torch.where(following >= 0, v[following], 0) - v
    factor = gamma * (lam.double()[sequence] if isinstance(lam, Tensor) else torch.full_like(v, lam))
    advantages = _discounted_sums(delta, factor, following)
    advantages = torch.where(_any_in(r.isnan(), sequence), 0, advantages)
    return ValueTargets(advantages.to(values.dtype), (advantages + v).to(values.dtype))


def value_targets(
    values: Tensor,
    rewards: Tensor,
    sequence: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lam: float = 1.0,
    length_alpha: float | None = None,
    whiten: bool = True,
) -> ValueTargets:
    """Advantages for the policy and targets for the critic, each with its lambda (VC-PPO, VAPO). [T] each.

    Args:
        values, rewards, sequence: as for `gae`; `sequence` is 0 .. S - 1.
        length_alpha: use the length-adaptive lambda instead of `lam`.
        whiten: normalise the advantages over the tokens of sequences with a reward.
    """
    lengths = torch.bincount(sequence)
    policy_lam = lam if length_alpha is None else length_adaptive_lambda(lengths, length_alpha)
    advantage = gae(values, rewards, sequence, gamma=gamma, lam=policy_lam).advantages
    returns = gae(values, rewards, sequence, gamma=gamma, lam=critic_lam).returns
    if whiten:
        counted = ~torch.isin(sequence, sequence[rewards.isnan()])
        advantage = whiten_values(advantage, counted)
    return ValueTargets(advantage, returns)


def discounted_returns(rewards: Tensor, sequence: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = sum_k gamma^k r_{t+k} within the sequence. [T] in and out; NaN where a later reward is NaN."""
    r = rewards.double()
    return _discounted_sums(r, torch.full_like(r, gamma), _next_token_index(sequence)).to(rewards.dtype)


def reward_at_last_token(rewards_S: Tensor, sequence: Tensor) -> Tensor:
    """[T]: each sequence's reward on its last token, 0 on the others; `sequence` is 0 .. S - 1."""
    return torch.where(_next_token_index(sequence) < 0, rewards_S[sequence], 0)


def reinforce_plus_plus(
    rewards_S: Tensor,
    groups_S: Tensor,
    sequence: Tensor,
    penalty: Tensor | None = None,
    *,
    episodes_S: Tensor | None = None,
    baseline: Literal["none", "group"] = "none",
    ddof: int = 1,
    eps: float = 1e-8,
) -> Tensor:
    """(G_t - mean) / (std + eps) over all tokens of the batch, G_t = r - sum_{k >= t} penalty_k. [T].

    REINFORCE++ (arXiv:2501.03262). Sequences without a reward get 0.

    Args:
        rewards_S: one per sequence, NaN where missing; `sequence` is 0 .. S - 1.
        penalty: [T], KL penalty subtracted from each token's reward.
        episodes_S: ids; the sequences of one episode have one reward, which counts once in the group's mean. None: all
            differ.
        baseline: "group" subtracts the group's mean from the reward; without a penalty uniform groups then get exactly
            0.
        ddof: 0 population, 1 sample standard deviation.
    """
    centred = rewards_S.double()
    if baseline == "group":
        episodes_S = torch.arange(len(centred)) if episodes_S is None else episodes_S
        centred = stepwise(centred, groups_S, episodes_S, advantage=mean_baseline)
    tokens = reward_at_last_token(torch.where(rewards_S.isnan(), torch.nan, centred), sequence)
    returns = discounted_returns(tokens if penalty is None else tokens - penalty.double(), sequence)
    values = whiten_values(returns, ~returns.isnan(), ddof=ddof, eps=eps)
    if baseline == "group" and penalty is None:
        values = torch.where(uniform_groups(rewards_S, groups_S)[sequence], 0, values)
    return values


def optimal_token_baseline(
    rewards_S: Tensor,
    groups_S: Tensor,
    sequence: Tensor,
    logprob: Tensor,
    collision: Tensor,
    penalty: Tensor | None = None,
    *,
    episodes_S: Tensor | None = None,
    zero_tail: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """G_t - B_t, B_t = sum_j W_jt G_jt / (sum_j W_jt + eps) over the group's sequences that have a token t. [T].

    Optimal token baseline (arXiv:2602.07078; as in verl). W_t is the sum over the tokens up to t of 1 - 2 pi + sum_v
    pi_v^2: the squared gradient of log pi with respect to the logits, as a proxy for that of the weights. Sequences
    without a reward are ignored and get 0. So do groups whose rewards are all equal, without a penalty.

    Args:
        logprob, collision: log pi of the token and sum_v pi_v^2, by the policy at the start of the step, [T].
        penalty: [T], KL penalty subtracted from each token's reward; G_t sums from t on.
        episodes_S: ids; the sequences of one episode share its weight. None: all differ.
        zero_tail: B_t is 0 if a single sequence has a token t. Otherwise its advantage there is 0.
    """
    scored = ~rewards_S.isnan()
    tokens = reward_at_last_token(rewards_S.double(), sequence)
    returns = discounted_returns(tokens if penalty is None else tokens - penalty.double(), sequence)
    rank = _position_in_sequence(sequence)
    power = 1 - 2 * logprob.double().exp() + collision.double()
    weight = _cumulative_sums(power, sequence, rank) * scored[sequence]
    if episodes_S is not None:
        _, index = torch.unique(episodes_S, return_inverse=True)
        weight = weight / torch.bincount(index)[index][sequence]
    cells, cell = torch.unique(torch.stack([groups_S[sequence], rank]), dim=1, return_inverse=True)
    sums = weight.new_zeros(3, cells.shape[1])
    values = torch.stack([weight * returns.nan_to_num(), weight, scored[sequence].double()])
    sums.index_add_(1, cell, values)
    baseline = sums[0] / (sums[1] + eps)
    if zero_tail:
        baseline = torch.where(sums[2] < 2, 0, baseline)
    zero = ~scored | (uniform_groups(rewards_S, groups_S) if penalty is None else False)
    return torch.where(zero[sequence], 0, returns - baseline[cell])


def length_adaptive_lambda(lengths: Tensor, alpha: float = 0.05) -> Tensor:
    """lam = 1 - 1 / (alpha l), not below 0 (VAPO, arXiv:2504.05118). [S] tokens in, float64 [S] out.

    The sum of the weights lam^k is then alpha l: proportional to the length. Lengths up to 1 / alpha get 0.
    """
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def stepwise(
    rewards: Tensor,
    groups: Tensor,
    episodes: Tensor,
    *,
    advantage: Callable[[Tensor, Tensor], Tensor] = grpo,
    per_step: bool = False,
) -> Tensor:
    """One group advantage per episode, repeated on each of its steps (Trinity-RFT's step-wise GRPO). [T] in and out.

    The baseline counts each episode once, however many steps it has.

    Args:
        rewards: the episode's reward on any or all of its steps, NaN on the others. Without one the episode gets 0.
        groups: ids of the episodes that are compared, the same on all steps of an episode.
        episodes: ids, unique within the batch.
        advantage: (rewards [E], groups [E]) -> advantages [E], of E episodes.
        per_step: divide by the number of the episode's steps, so that long episodes weigh no more than short ones.
    """
    unique, index, steps = torch.unique(episodes, return_inverse=True, return_counts=True)
    scored = ~rewards.isnan()
    reward_E = rewards.new_full((len(unique),), torch.nan)
    reward_E[index[scored]] = rewards[scored]
    group_E = groups.new_zeros(len(unique))
    group_E[index] = groups
    advantage_E = advantage(reward_E, group_E)
    return (advantage_E / steps if per_step else advantage_E)[index]


def gigpo(
    step_rewards: Tensor,
    groups: Tensor,
    episodes: Tensor,
    anchors: Tensor,
    *,
    weight: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["group", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """A^E + weight * A^S (GiGPO, arXiv:2505.10978), per step. [T] in and out.

    A^E compares the episode's undiscounted sum of rewards with the other episodes of its group, each counted once. A^S
    compares the step's discounted return with those of all steps of the group taken in the same state.

    Args:
        step_rewards: of the step. An episode with a NaN is left out and gets 0.
        groups: ids of the episodes with the same start, the same on all steps of an episode.
        episodes: ids, unique within the batch.
        anchors: ids of the state in which the step was taken; states of different groups are never compared.
        scale: "group" divides by the standard deviation of the compared values, "none" does not.
        ddof: 0 population, 1 sample standard deviation.
    """

    def relative(values: Tensor, ids: Tensor) -> Tensor:
        return grpo(values, ids, scale=scale, ddof=ddof, eps=eps)

    missing = _any_in(step_rewards.isnan(), episodes)
    r = torch.where(missing, torch.nan, step_rewards.double())
    episode = torch.unique(episodes, return_inverse=True)[1]
    total = r.new_zeros(len(r)).index_add_(0, episode, r)[episode]
    states = torch.unique(torch.stack([groups, anchors]), dim=1, return_inverse=True)[1]
    step_level = relative(discounted_returns(r, episodes, gamma=gamma), states)
    return (stepwise(total, groups, episodes, advantage=relative) + weight * step_level).to(step_rewards.dtype)


def _position_in_sequence(sequence: Tensor) -> Tensor:
    """int64 [T]: number of earlier tokens of the same sequence."""
    order = torch.argsort(sequence, stable=True)
    counts = torch.unique(sequence, return_counts=True)[1]
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)) - starts)


def _cumulative_sums(values: Tensor, sequence: Tensor, rank: Tensor) -> Tensor:
    """[T]: the sum over the tokens of the same sequence up to this one."""
    order = torch.argsort(sequence, stable=True)
    sums = values[order].cumsum(0)
    before = torch.cat([sums.new_zeros(1), sums])[torch.arange(len(order)) - rank[order]]
    return torch.empty_like(sums).index_copy_(0, order, sums - before)


def _next_token_index(sequence: Tensor) -> Tensor:
    """int64 [T]: the row of the next token of the same sequence, -1 after its last."""
    order = torch.argsort(sequence, stable=True)
    ids = sequence[order]
    following = torch.full_like(order, -1)
    following[order[:-1]] = torch.where(ids[:-1] == ids[1:], order[1:], -1)
    return following


def _discounted_sums(terms: Tensor, factor: Tensor, following: Tensor) -> Tensor:
    """[T]: sum over k of factor^k terms_{t+k} along `following`; `factor` [T] is constant within a sequence.

    Each iteration doubles the span that a row covers, so there are log2(longest sequence) iterations on flat rows.
    """
    while bool((following >= 0).any()):
        inside = following >= 0
        terms = terms + torch.where(inside, factor * terms[following], 0)
        factor = factor**2
        following = torch.where(inside, following[following], -1)
    return terms


def _any_in(flag: Tensor, sequence: Tensor) -> Tensor:
    """bool [T]: whether any token of the same sequence has the flag."""
    return torch.isin(sequence, sequence[flag])
