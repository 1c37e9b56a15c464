"""Advantages: one reward per experience in, one advantage per experience out.

Shapes: N experiences, K reward components. `rewards` is [N] with NaN where the reward is missing; `groups` is [N] of
integers, equal for experiences that are compared with each other, in any order. A missing reward is left out of every
baseline and gets advantage 0; a group whose rewards are all equal, or that has a single reward, gets exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the rewards in each experience's group: float64 [N] unless noted."""

    rewards: Tensor  #: the rewards, 0 where missing
    scored: Tensor  #: bool [N], has a reward
    index: Tensor  #: int64 [N], 0 .. number of groups - 1
    count: Tensor
    total: Tensor
    mean: Tensor
    uniform: Tensor  #: bool [N], all rewards of the group are equal (also with one reward or none)


def group_statistics(rewards: Tensor, groups: Tensor) -> GroupStatistics:
    """Computes counts, sums and means within each group, in float64."""
    scored = ~rewards.isnan()
    values = torch.where(scored, rewards, 0).double()
    index = torch.unique(groups, return_inverse=True)[1]
    n_groups = int(index.max()) + 1 if len(index) else 0
    count = values.new_zeros(n_groups).index_add_(0, index, scored.double())
    total = values.new_zeros(n_groups).index_add_(0, index, values)
    low = values.new_full((n_groups,), torch.inf).scatter_reduce_(0, index[scored], values[scored], "amin")
    high = values.new_full((n_groups,), -torch.inf).scatter_reduce_(0, index[scored], values[scored], "amax")
    mean = total / count.clamp(min=1)
    return GroupStatistics(values, scored, index, count[index], total[index], mean[index], (low >= high)[index])


def uniform_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [N]: True if all rewards of the experience's group are equal, so that nothing can be learned."""
    return group_statistics(rewards, groups).uniform


def mean_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean(r) within the group (Dr. GRPO, arXiv:2503.20783).

    Summed over tokens, its gradient estimate is (1 - 1/G) times an unbiased one.
    """
    s = group_statistics(rewards, groups)
    return _finish(s.rewards - s.mean, ~s.scored | s.uniform, rewards)


def grpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """(r - mean) / (std + eps) (GRPO, arXiv:2402.03300).

    Args:
        scale: divide by the standard deviation of the group, of the whole batch's rewards, or not at all.
        ddof: 0 population, 1 sample standard deviation.
    """
    s = group_statistics(rewards, groups)
    centred = s.rewards - s.mean
    if scale == "group":
        squares = torch.where(s.scored, centred**2, 0)
        summed = squares.new_zeros(len(squares)).index_add_(0, s.index, squares)[s.index]
        centred = centred / ((summed / (s.count - ddof).clamp(min=1)).sqrt() + eps)
    elif scale == "batch" and s.scored.sum() > ddof:
        centred = centred / (s.rewards[s.scored].std(correction=ddof) + eps)
    return _finish(centred, ~s.scored | s.uniform, rewards)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i - mean of the other rewards of the group (RLOO, arXiv:2402.14740).

    The gradient estimate is unbiased if tokens are summed (`sequence-sum-mean`, `constant`). `token-mean` and
    `sequence-mean` divide by random lengths and are biased.
    """
    s = group_statistics(rewards, groups)
    others = (s.total - s.rewards) / (s.count - 1).clamp(min=1)
    return _finish(s.rewards - others, ~s.scored | s.uniform, rewards)


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """r - sum_j T_j r_j / sum_j T_j within the group (OPO, arXiv:2505.23585).

    The minimum-variance baseline if the squared gradient of a completion is proportional to its length. `lengths` is
    [N], action tokens. A completion without tokens does not count in the baseline.
    """
    s = group_statistics(rewards, groups)
    length = torch.where(s.scored, lengths.double(), 0)
    zeros = length.new_zeros(len(length))
    tokens = zeros.index_add(0, s.index, length)[s.index]
    weighted = zeros.index_add(0, s.index, length * s.rewards)[s.index]
    return _finish(s.rewards - weighted / tokens.clamp(min=1), ~s.scored | s.uniform, rewards)


def pass_at_k(
    rewards: Tensor,
    groups: Tensor,
    *,
    k: int = 4,
    baseline: Literal["mean", "others"] = "mean",
    scale: Literal["subsets", "group", "none"] = "subsets",
    eps: float = 1e-6,
) -> Tensor:
    """Contribution of a completion to the best of k, over all subsets of k completions of the group.

    Args:
        k: of pass@k, at least 2; in a group with fewer rewards, k is their number.
        baseline: "mean": the mean over the subsets with the completion of their best reward, minus that over all
            subsets (Pass@k training, arXiv:2508.10751, in closed form, and for rewards other than 0 and 1). "others":
            minus the best of the subset's other members, so that, summed over tokens and without scale, the estimate
            is 1 / k times an unbiased one of the gradient of pass@k (PKPO, arXiv:2505.15201; with k of the whole group
            arXiv:2503.19595, verl's `grpo_passk`).
        scale: divide by eps plus the standard deviation of the subsets' best rewards (Pass@k training) or the sample
            standard deviation of the group's rewards (verl), or not at all.
    """
    s = group_statistics(rewards, groups)
    values = torch.zeros_like(s.rewards)
    for group in s.index[s.scored & ~s.uniform].unique():
        members = ((s.index == group) & s.scored).nonzero()[:, 0]
        values[members] = _best_of_subsets(s.rewards[members], k, baseline, scale, eps)
    return values.to(_floating(rewards).dtype)


def _best_of_subsets(r_n: Tensor, k: int, baseline: str, scale: str, eps: float) -> Tensor:
    """`pass_at_k` of one group of n rewards: each subset is counted by the rank of its best member."""
    n, k = len(r_n), min(k, len(r_n))
    ascending, order = r_n.sort()
    best = torch.tensor([math.comb(j, k - 1) / math.comb(n, k) for j in range(n)], dtype=torch.float64)
    mean, square = best @ ascending, best @ ascending**2
    # Subsets that contain i: row i counts the other k - 1 members by the best of them, at column j.
    rank = torch.arange(n).expand(n, n)
    rank = rank - (rank > torch.arange(n)[:, None]).long()  # among the others of row i
    chance = torch.tensor([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)], dtype=torch.float64)
    weight = chance[rank].fill_diagonal_(0)
    with_i = (weight * torch.maximum(ascending[:, None], ascending[None])).sum(1)
    centred = with_i - (mean if baseline == "mean" else weight @ ascending)
    if scale == "subsets":
        centred = centred / ((square - mean**2).clamp(min=0).sqrt() + eps)
    elif scale == "group":
        centred = centred / (ascending.std(correction=1) + eps)
    return torch.empty_like(centred).index_copy_(0, order, centred)


def best_of_group(
    rewards: Tensor, groups: Tensor, *, accept: Literal["best", "all"] = "best", threshold: float | None = None
) -> Tensor:
    """1 for accepted completions, 0 for the others (RAFT, arXiv:2304.06767, algorithm 1: the best of each group).

    Args:
        accept: "best": one of each group, the first of the best. "all": all above `threshold` (arXiv:2504.11343, with
            threshold 0).
        threshold: completions with a reward up to this are never accepted. None: no bound.
    """
    s = group_statistics(rewards, groups)
    # the threshold is rounded like the rewards, so that one that equals it in the run file does so here
    accepted = s.scored if threshold is None else s.scored & (_floating(rewards) > threshold)
    if accept == "best":
        best = s.rewards.new_full((len(rewards),), -torch.inf)
        best.scatter_reduce_(0, s.index[s.scored], s.rewards[s.scored], "amax")
        accepted = accepted & (s.rewards == best[s.index])
        first = torch.full_like(s.index, len(rewards))
        found = accepted.nonzero()[:, 0]
        first.scatter_reduce_(0, s.index[found], found, "amin")
        accepted = accepted & (torch.arange(len(rewards)) == first[s.index])
    return accepted.to(_floating(rewards).dtype)


def reinforce(rewards: Tensor, groups: Tensor, *, baseline: Literal["batch", "none"] = "batch") -> Tensor:
    """REINFORCE (Williams 1992): r - mean(r) over the whole batch, or the raw reward. Ignores groups."""
    if baseline == "batch":
        return mean_baseline(rewards, torch.zeros_like(groups))
    return torch.nan_to_num(_floating(rewards), nan=0.0)


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """r - r(greedy completion of the same prompt) (ReMax, arXiv:2310.10505).

    An unbiased gradient estimate if tokens are summed (`sequence-sum-mean`, `constant`).

    `greedy_rewards` is [N]: each experience's baseline. The result is 0 where either reward is missing (NaN).
    """
    difference = rewards.double() - greedy_rewards.double()
    return _finish(difference, difference.isnan(), rewards)


def opmd(
    rewards: Tensor, groups: Tensor, *, baseline: Literal["mean", "logavgexp"] = "mean", tau: float = 1.0
) -> Tensor:
    """r minus the group's baseline (OPMD, Trinity-RFT, arXiv:2505.17826; Kimi k1.5, arXiv:2501.12599).

    Args:
        baseline: the mean, or tau log(mean(exp(r / tau))): the policy's tau log Z estimated from the group, which is
            the mean + variance / (2 tau) + O(1 / tau^2).
        tau: temperature of mirror descent; a small one moves logavgexp towards the best reward.
    """
    if baseline == "mean":
        return mean_baseline(rewards, groups)
    s = group_statistics(rewards, groups)
    index, scaled = s.index[s.scored], s.rewards[s.scored] / tau
    high = scaled.new_full((len(rewards),), -torch.inf).scatter_reduce_(0, index, scaled, "amax")
    summed = scaled.new_zeros(len(rewards)).index_add_(0, index, (scaled - high[index]).exp())
    log_mean = (high + summed.log())[s.index] - s.count.log()
    return _finish(s.rewards - tau * log_mean, ~s.scored | s.uniform, rewards)


def asymre(rewards: Tensor, groups: Tensor, *, beta: float = 0.1, keep_uniform: bool = False) -> Tensor:
    """r - (mean(r) - beta) (AsymRE, arXiv:2506.20520): a lower baseline weights successes more than failures.

    Args:
        beta: how far the baseline lies below the group's mean.
        keep_uniform: give uniform groups and groups of one beta, as the formula does, instead of 0.
    """
    s = group_statistics(rewards, groups)
    centred = torch.where(s.uniform, 0, s.rewards - s.mean)
    zero = ~s.scored if keep_uniform else ~s.scored | s.uniform
    return _finish(centred + beta, zero, rewards)


def gdpo(
    rewards_NK: Tensor,
    groups: Tensor,
    *,
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    whitened: bool = True,
) -> Tensor:
    """Advantages of several rewards, each normalised separately (GDPO, arXiv:2601.05242). [N].

    Each component is normalised within the group as in GRPO; their weighted sum is normalised over the batch.

    Args:
        rewards_NK: [N, K]; a NaN (missing) is left out of its group's statistics and adds 0.
        weights: of the K components; None: all 1. A group that is uniform in every component of nonzero weight gets 0.
        ddof: 0 population, 1 sample standard deviation, both in the group and over the batch.
        whitened: False skips the normalisation over the batch.
    """
    parts = rewards_NK.double().unbind(dim=1)
    weight = [1.0] * len(parts) if weights is None else weights
    total = torch.zeros_like(groups, dtype=torch.float64)
    scored, uniform = torch.zeros_like(groups, dtype=torch.bool), torch.ones_like(groups, dtype=torch.bool)
    for part, w in zip(parts, weight, strict=True):
        if w:
            total = total + w * grpo(part, groups, ddof=ddof, eps=eps)
            scored = scored | ~part.isnan()
            uniform = uniform & uniform_groups(part, groups)
    if whitened:
        total = whiten(total, scored, ddof=ddof, eps=eps)
    return _finish(total, ~scored | uniform, rewards_NK)


def whiten(
    values: Tensor,
    counted: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
) -> Tensor:
    """(x - mean) / (std + eps) over the counted values: PPO's normalisation of advantages.

    Args:
        values: [n], experiences or tokens.
        counted: bool [n]; other values are ignored and get 0. None: all count.
        weights: [n], frequency weights, such as lengths. None: all 1.
        ddof: 0 population, 1 sample standard deviation.

    Returns:
        [n]; exactly 0 if all counted values are equal.
    """
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    x = values[counted].double()
    times = torch.ones_like(x) if weights is None else weights[counted].double()
    result = torch.zeros_like(values, dtype=torch.float64)
    if not bool((x == x[:1]).all()):
        centred = x - (times * x).sum() / times.sum()
        deviation = ((times * centred**2).sum() / (times.sum() - ddof).clamp(min=1)).sqrt()
        result[counted] = centred / (deviation + eps)
    return result.to(_floating(values).dtype)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), [N] in [-1, 0].

    0 up to max_length - buffer, then ((max_length - buffer) - length) / buffer, and -1 past max_length.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def _floating(rewards: Tensor) -> Tensor:
    return rewards if rewards.is_floating_point() else rewards.float()


def _finish(values: Tensor, zero: Tensor, like: Tensor) -> Tensor:
    return torch.where(zero, 0, values).to(_floating(like).dtype)
