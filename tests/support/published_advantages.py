"""Every algorithm's published advantage, written out: a number per completion, or a tensor of numbers per token."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.types import Experience

PARTS = {"exact": 2.0, "format": 0.5, "shown": 0.0}  #: weights of the parts of the reward

Lists = list[Tensor]


class Case(NamedTuple):
    """Judged rollouts with the log-probs of their action tokens, one tensor each, and those of demonstrations."""

    batch: list[Experience]
    own: Lists  #: of the policy, with gradient
    start: Lists  #: of the policy at the start of the step
    reference: Lists
    experts: Lists
    distributions: Lists  #: of the policy, log-probs of the whole vocabulary at each action token, without gradient
    start_distributions: Lists  #: of the policy at the start of the step


def centred(values: Sequence[float], ids: Sequence[Hashable]) -> list[float]:
    """r - mean of those with the same id; exactly 0 where they are all equal."""
    peers = [[v for v, other in zip(values, ids, strict=True) if other == each] for each in ids]
    return [0.0 if len(set(p)) == 1 else v - float(np.mean(p)) for v, p in zip(values, peers, strict=True)]


def normalised(values: Sequence[float], ids: Sequence[Hashable]) -> list[float]:
    """(r - mean) / (sample std + 1e-6) of those with the same id."""
    found = []
    for a, each in zip(centred(values, ids), ids, strict=True):
        peers = [v for v, other in zip(values, ids, strict=True) if other == each]
        found.append(a / (float(np.std(peers, ddof=1)) + 1e-6) if len(peers) > 1 else 0.0)
    return found


def whitened(values: Tensor) -> Tensor:
    """(x - mean) / sample std."""
    return (values - values.mean()) / values.std(correction=1)


def rewards_of(c: Case) -> list[float]:
    """In the order of the batch."""
    return [float(e.reward) for e in c.batch if e.reward is not None]


def groups_of(c: Case) -> list[str]:
    """In the order of the batch."""
    return [e.group for e in c.batch]


def mean_baseline(c: Case) -> list[float]:
    """Dr. GRPO: r - mean within the group."""
    return centred(rewards_of(c), groups_of(c))


def grpo(c: Case) -> list[float]:
    """GRPO: (r - mean) / std within the group."""
    return normalised(rewards_of(c), groups_of(c))


def leave_one_out(c: Case) -> list[float]:
    """RLOO: r - mean of the others of the group."""
    found = []
    for i, e in enumerate(c.batch):
        others = [r for j, r in enumerate(rewards_of(c)) if j != i and c.batch[j].group == e.group]
        found.append(rewards_of(c)[i] - sum(others) / len(others))
    return found


def by_length(c: Case) -> list[float]:
    """OPO: r - the group's mean weighted by length; 0 where nothing differs."""
    found = []
    for r, e in zip(rewards_of(c), c.batch, strict=True):
        peers = [
            (len(lp), q) for lp, q, other in zip(c.start, rewards_of(c), c.batch, strict=True) if other.group == e.group
        ]
        baseline = sum(n * q for n, q in peers) / sum(n for n, _ in peers)
        found.append(0.0 if e.group in uniform_groups(c) else r - baseline)
    return found


def optimal_token_baseline(c: Case) -> Lists:
    """OTB: r - a mean of the group's rewards per token, weighted by the squared gradients of the logits so far."""
    gathered = []  # the squared norm of one_hot - p, the gradient of log p(token) with respect to the logits
    for lp, full in zip(c.start, c.start_distributions, strict=True):
        p, own = full.exp().double(), lp.exp().double()
        norms = (p**2).sum(-1) - own**2 + (1 - own) ** 2
        gathered.append([float(norms[: t + 1].sum()) for t in range(len(norms))])
    found = []
    for i, e in enumerate(c.batch):
        values = []
        for t in range(len(c.start[i])):
            peers = [j for j, o in enumerate(c.batch) if o.group == e.group and len(c.start[j]) > t]
            weights = [gathered[j][t] for j in peers]
            mean = sum(w * rewards_of(c)[j] for w, j in zip(weights, peers, strict=True)) / sum(weights)
            values.append(0.0 if e.group in uniform_groups(c) else rewards_of(c)[i] - mean)
        found.append(torch.tensor(values))
    return found


def pass_at_k(c: Case, k: int) -> list[float]:
    """Pass@k training by brute force: every subset of k completions of the group has its best reward."""
    found = []
    for i, e in enumerate(c.batch):
        peers = [j for j, other in enumerate(c.batch) if other.group == e.group]
        best = {subset: max(rewards_of(c)[j] for j in subset) for subset in itertools.combinations(peers, k)}
        own = [value for subset, value in best.items() if i in subset]
        deviation = float(np.std(list(best.values())))
        uniform = e.group in uniform_groups(c)
        found.append(0.0 if uniform else (np.mean(own) - np.mean(list(best.values()))) / (deviation + 1e-6))
    return [float(a) for a in found]


def over_the_batchs_deviation(c: Case) -> list[float]:
    """Lite PPO: r - mean within the group, over the standard deviation of all rewards."""
    return [a / (float(np.std(rewards_of(c), ddof=1)) + 1e-6) for a in mean_baseline(c)]


def batch_baseline(c: Case) -> list[float]:
    """REINFORCE: r - mean over the batch."""
    return [r - float(np.mean(rewards_of(c))) for r in rewards_of(c)]


def batch_normalised(c: Case) -> Lists:
    """REINFORCE++-baseline: r - mean within the group, normalised over all tokens; 0 where nothing differs."""
    lengths = [len(each) for each in c.start]
    spread = torch.cat([torch.full((n,), a).double() for n, a in zip(lengths, mean_baseline(c), strict=True)])
    pieces = zip(whitened(spread).split(lengths), c.batch, strict=True)
    return [torch.zeros_like(each) if e.group in uniform_groups(c) else each for each, e in pieces]


def penalised(c: Case) -> Lists:
    """REINFORCE++, of token t: r less .01 times the sum of k1 from t to the end, normalised over all tokens."""
    returns = []
    for r, start, reference in zip(rewards_of(c), c.start, c.reference, strict=True):
        k1 = (start - reference).double()
        returns.append(torch.stack([r - 0.01 * k1[t:].sum() for t in range(len(k1))]))
    return list(whitened(torch.cat(returns)).split([len(each) for each in returns]))


def lowered(c: Case) -> list[float]:
    """AsymRE: r - (mean - .1) within the group; 0 where nothing differs."""
    pairs = zip(mean_baseline(c), c.batch, strict=True)
    return [0.0 if e.group in uniform_groups(c) else a + 0.1 for a, e in pairs]


def parts(c: Case) -> list[float]:
    """GDPO. A part that an experience lacks adds nothing to its sum."""
    total = torch.zeros(len(c.batch), dtype=torch.float64)
    for name in ("exact", "format"):
        having = [i for i, e in enumerate(c.batch) if name in e.reward_parts]
        values = [c.batch[i].reward_parts[name] for i in having]
        total[having] += PARTS[name] * torch.tensor(normalised(values, [c.batch[i].group for i in having])).double()
    return [0.0 if e.group in uniform_parts(c) else float(a) for a, e in zip(whitened(total), c.batch, strict=True)]


def _episodes(c: Case) -> list[str]:
    return [e.episode for e in c.batch]


def _per_episode(c: Case, rewards: dict[str, float]) -> list[float]:
    """Of each step: GRPO's advantage of its episode among the episodes of the group."""
    names = list(rewards)
    advantage = normalised([rewards[name] for name in names], [name.partition("/")[0] for name in names])
    return [advantage[names.index(episode)] for episode in _episodes(c)]


def stepwise(c: Case) -> list[float]:
    """Step-wise GRPO: the reward stands on every step of the episode."""
    return _per_episode(c, dict(zip(_episodes(c), rewards_of(c), strict=True)))


def group_in_group(c: Case) -> list[float]:
    """GiGPO, with weight 1 and discount .95. Steps come in the order of time."""
    r, episodes = rewards_of(c), _episodes(c)
    steps = {name: [i for i, other in enumerate(episodes) if other == name] for name in dict.fromkeys(episodes)}
    following = [[j for j in steps[name] if j >= i] for i, name in enumerate(episodes)]
    returns = [sum(0.95**k * r[j] for k, j in enumerate(later)) for later in following]
    by_state = normalised(returns, [(e.group, e.anchor) for e in c.batch])
    by_episode = _per_episode(c, {name: sum(r[i] for i in own) for name, own in steps.items()})
    return [a + b for a, b in zip(by_episode, by_state, strict=True)]


def uniform_groups(c: Case) -> set[str]:
    """Groups whose rewards are all equal."""
    return {g for g in groups_of(c) if len({e.reward for e in c.batch if e.group == g}) == 1}


def uniform_parts(c: Case) -> set[str]:
    """Groups in which each part of the reward that has a weight is the same wherever it is known."""

    def known(name: str, group: str) -> set[float]:
        return {e.reward_parts[name] for e in c.batch if e.group == group and name in e.reward_parts}

    return {g for g in groups_of(c) if all(len(known(name, g)) <= 1 for name in ("exact", "format"))}
