"""Advantages: from one reward per experience to one advantage per experience.

Shapes: N experiences. `rewards` is [N] with NaN where the reward is missing; `groups` is [N] of integers, equal for
experiences that are compared with each other, in any order. A missing reward is left out of every baseline and gets
advantage 0; a group whose rewards are all equal, or that has one judged experience, gets exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Per experience, over the judged experiences of its group: float64 [N] unless said otherwise."""

    rewards: Tensor  #: the rewards, 0 where missing
    judged: Tensor  #: bool [N]
    index: Tensor  #: int64 [N], 0 .. number of groups - 1
    count: Tensor
    total: Tensor
    mean: Tensor
    uniform: Tensor  #: bool [N], all judged rewards of the group are equal (so also for a group of one or none)


def group_statistics(rewards: Tensor, groups: Tensor) -> GroupStatistics:
    """Counts, sums and means within each group, in float64, found by group id."""
    judged = ~rewards.isnan()
    values = torch.where(judged, rewards, 0).double()
    index = torch.unique(groups, return_inverse=True)[1]
    n_groups = int(index.max()) + 1 if len(index) else 0
    count = values.new_zeros(n_groups).index_add_(0, index, judged.double())
    total = values.new_zeros(n_groups).index_add_(0, index, values)
    low = values.new_full((n_groups,), torch.inf).scatter_reduce_(0, index[judged], values[judged], "amin")
    high = values.new_full((n_groups,), -torch.inf).scatter_reduce_(0, index[judged], values[judged], "amax")
    mean = total / count.clamp(min=1)
    return GroupStatistics(values, judged, index, count[index], total[index], mean[index], (low >= high)[index])


def uniform_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [N]: True where all judged rewards of the experience's group are equal, so that nothing can be learned."""
    return group_statistics(rewards, groups).uniform


def mean_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean(r) within the group (Dr. GRPO, arXiv:2503.20783).

    Its gradient estimate is (1 - 1/G) times an unbiased one.
    """
    s = group_statistics(rewards, groups)
    return _finish(s.rewards - s.mean, ~s.judged | s.uniform, rewards)


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
        scale: whose standard deviation divides: the group's, the rewards' of the whole batch, or nobody's.
        ddof: 0 population, 1 sample standard deviation.
    """
    s = group_statistics(rewards, groups)
    centred = s.rewards - s.mean
    if scale == "group":
        squares = torch.where(s.judged, centred**2, 0)
        summed = squares.new_zeros(len(squares)).index_add_(0, s.index, squares)[s.index]
        centred = centred / ((summed / (s.count - ddof).clamp(min=1)).sqrt() + eps)
    elif scale == "batch" and s.judged.sum() > ddof:
        centred = centred / (s.rewards[s.judged].std(correction=ddof) + eps)
    return _finish(centred, ~s.judged | s.uniform, rewards)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i - mean of the other rewards of the group (RLOO, arXiv:2402.14740): an unbiased gradient estimate."""
    s = group_statistics(rewards, groups)
    others = (s.total - s.rewards) / (s.count - 1).clamp(min=1)
    return _finish(s.rewards - others, ~s.judged | s.uniform, rewards)


def reinforce(rewards: Tensor, groups: Tensor, *, baseline: Literal["batch", "none"] = "batch") -> Tensor:
    """REINFORCE (Williams 1992): r - mean(r) over the whole batch, or the bare reward. Groups play no part."""
    if baseline == "batch":
        return mean_baseline(rewards, torch.zeros_like(groups))
    return torch.nan_to_num(_floating(rewards), nan=0.0)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), [N] in [-1, 0].

    0 up to max_length - buffer, then ((max_length - buffer) - length) / buffer, and -1 past max_length.
    """
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


def _floating(rewards: Tensor) -> Tensor:
    return rewards if rewards.is_floating_point() else rewards.float()


def _finish(values: Tensor, zero: Tensor, like: Tensor) -> Tensor:
    return torch.where(zero, 0, values).to(_floating(like).dtype)
