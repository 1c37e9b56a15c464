"""Every algorithm's published loss, written out over unpacked sequences in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.types import Experience
from support import published_advantages as adv
from support.algorithm_batches import LIMIT
from support.published_advantages import Case, Lists

Numbers = Sequence[float] | Lists


class Formula(NamedTuple):
    """How an algorithm is called, and its loss."""

    name: str
    loss: Callable[[Case], Tensor]
    noise: float = 0.1  #: how far the recorded log-probs are from the policy's
    prepare: Callable[[list[Experience]], None] = lambda batch: None
    keys: Mapping[str, Any] = MappingProxyType({})


def _recorded(e: Experience) -> Tensor:
    return torch.from_numpy(e.logprobs[e.action_mask])


def _log_ratios(c: Case) -> Lists:
    return [lp - _recorded(e) for e, lp in zip(c.batch, c.own, strict=True)]


def _clip(log_ratio: Tensor, a: float | Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def surrogate(c: Case, advantages: Numbers, low: float = 0.2, high: float = 0.2) -> Lists:
    """PPO's clipped terms."""
    return [_clip(ratio, a, low, high) for ratio, a in zip(_log_ratios(c), advantages, strict=True)]


def _likelihood(c: Case, advantages: Numbers) -> Lists:
    return [-a * lp for lp, a in zip(c.own, advantages, strict=True)]


def _against_greedy(c: Case) -> Lists:
    """Experiences without a greedy reward are left out."""
    known = [
        (r, e.greedy_reward, lp)
        for r, e, lp in zip(adv.rewards_of(c), c.batch, c.own, strict=True)
        if e.greedy_reward is not None
    ]
    return [-(r - greedy) * lp for r, greedy, lp in known]


def _weighed(c: Case, advantages: Numbers, weight: Callable[[Tensor, Any], Any]) -> Lists:
    ratios = [each.detach().exp() for each in _log_ratios(c)]
    return [weight(rho, a) * -a * lp for rho, a, lp in zip(ratios, advantages, c.own, strict=True)]


def _gated(c: Case) -> Lists:
    terms = []
    for log_ratio, a in zip(_log_ratios(c), adv.grpo(c), strict=True):
        tau = 1.0 if a > 0 else 1.05
        terms.append(-4 / tau / (1 + torch.exp(-tau * (log_ratio.exp() - 1))) * a)
    return terms


def _in_total_variation(c: Case) -> Lists:
    terms = []
    for e, lp, log_ratio, a in zip(c.batch, c.own, _log_ratios(c), adv.mean_baseline(c), strict=True):
        moved = (lp.exp() - _recorded(e).exp()).detach()
        keep = moved <= 0.2 if a > 0 else moved >= -0.2
        terms.append(-a * keep * log_ratio.exp() + 1e-3 * log_ratio**2)
    return terms


def _best(c: Case) -> Lists:
    """Of the first best completion of each group."""
    best = {}
    for r, lp, group in zip(adv.rewards_of(c), c.own, adv.groups_of(c), strict=True):
        if group not in best or r > best[group][0]:
            best[group] = r, -lp
    return [terms for _, terms in best.values()]


def _above(c: Case, threshold: float) -> Lists:
    return [-lp for r, lp in zip(adv.rewards_of(c), c.own, strict=True) if r > threshold]


def _geometric(c: Case) -> Tensor:
    terms = []
    for log_ratio, a in zip(_log_ratios(c), adv.grpo(c), strict=True):
        sign = 1 if a >= 0 else -1
        ratios = [torch.exp(sign * x) for x in log_ratio]
        product = torch.stack([torch.clamp(x, max=float(np.exp(0.4))) for x in ratios]).prod() ** sign
        terms.append(-a * product ** (1 / len(ratios)))
    return torch.stack(terms).mean()


def _gamma_weighted(c: Case) -> Lists:
    def weight(rho: Tensor, a: float) -> float:
        k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        w = float(rho.prod())
        return float(w**k * np.exp(lam * (1 - w)))

    return _weighed(c, adv.grpo(c), weight)


class _Tokens(NamedTuple):
    """All judged tokens of the step one after the other, as numbers."""

    lp: list[float]
    ratio: list[float]
    a: list[float]
    entropy: list[float]
    discriminant: list[float]
    expected: list[float]  #: of the discriminant over the vocabulary
    covariance: list[float]


def _tokens(c: Case, advantages: Sequence[float]) -> _Tokens:
    lp = torch.cat(c.own).detach().double()
    full = torch.cat(c.distributions).double()
    a = torch.cat([torch.full((len(own),), x) for own, x in zip(c.own, advantages, strict=True)]).double()
    p = full.exp()
    entropy = -(p * full).sum(-1)
    by_word = p * (entropy[:, None] + full)
    columns = (
        lp,
        torch.cat(_log_ratios(c)).detach().exp(),
        a,
        entropy,
        lp.exp() * (entropy + lp),
        (p * by_word).sum(-1),
        (lp - lp.mean()) * (a - a.mean()),
    )
    return _Tokens(*(column.tolist() for column in columns))


def _masked(c: Case, terms: Lists, keep: Sequence[bool]) -> Tensor:
    """The mean over all tokens, of which only some have a term."""
    flat = torch.cat(terms)
    return torch.stack([x for x, kept in zip(flat, keep, strict=True) if kept]).sum() / len(flat)


def _forking(c: Case, top: float = 0.2) -> Tensor:
    """The fifth of the tokens with the highest entropy, of the groups that differ."""
    uniform = adv.uniform_groups(c)
    chosen = [i for i, e in enumerate(c.batch) if e.group not in uniform]
    left = Case(
        *([column[i] for i in chosen] for column in c[:4]),
        c.experts,
        *([column[i] for i in chosen] for column in c[5:]),
    )
    entropy = _tokens(left, adv.grpo(left)).entropy
    bound = np.quantile(entropy, 1 - top) - 1e-5
    return _masked(left, surrogate(left, adv.grpo(left), high=0.28), [h >= bound for h in entropy])


def _without_lowest_discriminants(c: Case, mu: float) -> Tensor:
    t = _tokens(c, adv.grpo(c))
    bound = np.mean(t.discriminant) - mu * np.std(t.discriminant)
    keep = [not (a < 0 and s < bound) for a, s in zip(t.a, t.discriminant, strict=True)]
    assert not all(keep)
    return _masked(c, surrogate(c, adv.grpo(c)), keep)


def _without_greatest_differences(c: Case, mu: float, share: float) -> Tensor:
    t = _tokens(c, adv.grpo(c))
    difference = np.subtract(t.expected, t.discriminant)
    beyond = [i for i, a in enumerate(t.a) if a < 0 and difference[i] > mu * np.std(difference)]
    room = max(int(share * len(t.a)), 1)
    assert len(beyond) > room
    worst = sorted(beyond, key=lambda i: -difference[i])[:room]
    return _masked(c, surrogate(c, adv.grpo(c)), [i not in worst for i in range(len(t.a))])


def _without_covariance(c: Case, low: float, high: float) -> Tensor:
    """With a share of 1, where nothing is left to chance."""
    t = _tokens(c, adv.grpo(c))
    clipped = [(a > 0 and rho > 1.2) or (a < 0 and rho < 0.8) for a, rho in zip(t.a, t.ratio, strict=True)]
    keep = [gone or not low < cov < high for gone, cov in zip(clipped, t.covariance, strict=True)]
    assert not all(keep)
    assert any(clipped)
    return _masked(c, surrogate(c, adv.grpo(c)), keep)


def _penalised_covariance(c: Case, share: float, coefficient: float) -> Tensor:
    t = _tokens(c, adv.grpo(c))
    count = max(int(share * len(t.a)), 1)
    bound = sorted(t.covariance, reverse=True)[count - 1]
    log_ratio = torch.cat(_log_ratios(c))
    a = torch.tensor(t.a)
    chosen = torch.tensor([cov >= bound for cov in t.covariance])
    return (-log_ratio.exp() * a + coefficient * torch.where(chosen, log_ratio.abs(), 0)).mean()


def _second_moment(c: Case, threshold: float = 0.04) -> Tensor:
    """Algorithm 1: take the greatest away, one by one, until the mean of the others is small enough."""
    t = _tokens(c, adv.grpo(c))
    squares = {
        i: float(np.log(rho)) ** 2
        for i, (a, rho) in enumerate(zip(t.a, t.ratio, strict=True))
        if (a > 0 and rho > 1) or (a < 0 and rho < 1)
    }
    gone = set()
    while squares and np.mean(list(squares.values())) > threshold:
        worst = max(squares, key=lambda i: squares[i])
        gone.add(worst)
        del squares[worst]
    terms = [-log_ratio.exp() * a for log_ratio, a in zip(_log_ratios(c), adv.grpo(c), strict=True)]
    return _masked(c, terms, [i not in gone for i in range(len(t.a))])


def _k2(c: Case) -> Lists:
    return [(lp - reference) ** 2 / 2 for lp, reference in zip(c.own, c.reference, strict=True)]


def _one_sided(ratio: Tensor, a: float) -> Tensor:
    return ratio <= 1.2 if a > 0 else ratio >= 0.8


def _tapered(ratio: Tensor, a: float) -> float:
    return 1.0 if a >= 0 else min(float(ratio.prod()), 1.0)


def token_mean(terms: Lists) -> Tensor:
    """Over all tokens."""
    return torch.cat(terms).mean()


def sequence_mean(terms: Lists) -> Tensor:
    """Over completions of the mean over their tokens."""
    return torch.stack([each.mean() for each in terms]).mean()


def _sum_mean(terms: Lists) -> Tensor:
    return torch.stack([each.sum() for each in terms]).mean()


def _differing(c: Case, terms: Lists, uniform: set[str]) -> Lists:
    return [term for term, e in zip(terms, c.batch, strict=True) if e.group not in uniform]


def _squares(c: Case, difference: Callable[[Tensor, float], Tensor]) -> Tensor:
    pairs = zip(_log_ratios(c), adv.mean_baseline(c), strict=True)
    return torch.stack([difference(ratio.sum(), a) ** 2 for ratio, a in pairs]).mean()


def _gspo(c: Case) -> Tensor:
    pairs = zip(_log_ratios(c), adv.grpo(c), strict=True)
    return torch.stack([_clip(ratio.mean(), a, 3e-4, 4e-4) for ratio, a in pairs]).mean()


def _imitation(c: Case) -> Tensor:
    return -torch.cat(c.experts).mean()


def _expected_imitation(c: Case) -> Tensor:
    """Has the gradient of the mean of -p."""
    lp = torch.cat(c.experts)
    return -(lp.detach().exp() * lp).mean()


def _unsure_imitation(c: Case, cutoff: float = 1.0) -> Tensor:
    lp = torch.cat(c.experts)
    p = lp.detach().exp()
    kept = torch.where(p < cutoff, lp, np.log(cutoff)) if cutoff < 1 else lp
    return -(p * (1 - p) * kept).mean()


def _margins(c: Case) -> Tensor:
    gain = {e.id: lp.sum() - ref.sum() for e, lp, ref in zip(c.batch, c.own, c.reference, strict=True)}
    return torch.stack([gain[f"{group}-1"] - gain[f"{group}-0"] for group in sorted(set(adv.groups_of(c)))])


def _odds_ratio(c: Case) -> Tensor:
    terms = []
    for group in sorted(set(adv.groups_of(c))):
        chosen, rejected = (
            next(lp.mean() for e, lp in zip(c.batch, c.own, strict=True) if e.id == f"{group}-{n}") for n in (1, 0)
        )
        odds = [p / (1 - p) for p in (chosen.exp(), rejected.exp())]
        terms.append(-chosen + 0.1 * torch.log(1 + odds[1] / odds[0]))
    return torch.stack(terms).mean()


def _surrogate_mean(c: Case) -> Tensor:
    return sequence_mean(surrogate(c, adv.grpo(c)))


def _one_reward_per_episode(batch: list[Experience]) -> None:
    first: dict[str, float | None] = {}
    for e in sorted(batch, key=lambda e: e.id):
        e.reward = first.setdefault(e.episode, e.reward)


def _without_a_greedy_reward(batch: list[Experience]) -> None:
    for e in batch:
        if e.group == "g1":
            e.greedy_reward = None


def _without_a_part(batch: list[Experience]) -> None:
    for e in batch:
        if e.id in ("g1-3", "g2-0"):
            del e.reward_parts["format" if e.group == "g1" else "exact"]


def _equal_sums_of_parts(batch: list[Experience]) -> None:
    for e in batch:
        if e.group == "g1":
            e.reward, e.reward_parts["format"] = 2.0, 4 - 4 * e.reward_parts["exact"]


FORMULAS = {
    "grpo": Formula("grpo", _surrogate_mean),
    "grpo token-mean": Formula(
        "grpo", lambda c: token_mean(surrogate(c, adv.grpo(c))), keys={"aggregation": "token-mean"}
    ),
    "dr_grpo": Formula("dr_grpo", lambda c: _sum_mean(surrogate(c, adv.mean_baseline(c))) / LIMIT),
    "dapo": Formula(
        "dapo", lambda c: token_mean(_differing(c, surrogate(c, adv.grpo(c), high=0.28), adv.uniform_groups(c)))
    ),
    "rloo": Formula("rloo", lambda c: _sum_mean(surrogate(c, adv.leave_one_out(c)))),
    "reinforce": Formula("reinforce", lambda c: token_mean(surrogate(c, adv.batch_baseline(c)))),
    "reinforce_plus_plus": Formula("reinforce_plus_plus", lambda c: token_mean(surrogate(c, adv.penalised(c)))),
    "reinforce_plus_plus_baseline": Formula(
        "reinforce_plus_plus_baseline",
        lambda c: token_mean(surrogate(c, adv.batch_normalised(c))) + 0.01 * token_mean(_k2(c)),
    ),
    "remax": Formula("remax", lambda c: _sum_mean(_against_greedy(c))),
    "remax without a greedy reward": Formula(
        "remax", lambda c: _sum_mean(_against_greedy(c)), prepare=_without_a_greedy_reward
    ),
    "gspo": Formula("gspo", _gspo, noise=3e-4),
    "cispo": Formula(
        "cispo", lambda c: token_mean(_weighed(c, adv.grpo(c), lambda rho, a: rho.clamp(0, 5))), noise=1.0
    ),
    "sapo": Formula("sapo", lambda c: sequence_mean(_gated(c)), noise=0.3),
    "topr": Formula("topr", lambda c: _sum_mean(_weighed(c, adv.mean_baseline(c), _tapered))),
    "opmd": Formula("opmd", lambda c: token_mean(_likelihood(c, adv.mean_baseline(c))) / 2),
    "kimi": Formula("kimi", lambda c: _squares(c, lambda log_ratio, a: a - 0.1 * log_ratio)),
    "asymre": Formula("asymre", lambda c: _sum_mean(_likelihood(c, adv.lowered(c)))),
    "rec": Formula("rec", lambda c: token_mean(_weighed(c, adv.mean_baseline(c), _one_sided))),
    "sppo": Formula("sppo", lambda c: _squares(c, lambda log_ratio, a: log_ratio - a / 1e-3)),
    "sppo beta .5": Formula(
        "sppo", lambda c: _squares(c, lambda log_ratio, a: log_ratio - a / 0.5), keys={"loss": {"beta": 0.5}}
    ),
    "raft": Formula("raft", lambda c: token_mean(_best(c))),
    "raft all above a threshold": Formula(
        "raft", lambda c: token_mean(_above(c, 0.1)), keys={"advantage": {"accept": "all", "threshold": 0.1}}
    ),
    "gmpo": Formula("gmpo", _geometric, noise=0.5),
    "opo": Formula("opo", lambda c: _sum_mean(_likelihood(c, adv.by_length(c)))),
    "otb": Formula("otb", lambda c: token_mean(surrogate(c, adv.optimal_token_baseline(c)))),
    "vespo": Formula("vespo", lambda c: token_mean(_gamma_weighted(c))),
    "clip_cov": Formula(
        "clip_cov",
        lambda c: _without_covariance(c, 0.1, 0.8),
        noise=0.2,
        keys={"masks": [{"name": "clip_cov", "share": 1.0, "low": 0.1, "high": 0.8}]},
    ),
    "kl_cov": Formula(
        "kl_cov", lambda c: _penalised_covariance(c, 0.1, 0.7), keys={"loss": {"share": 0.1, "coefficient": 0.7}}
    ),
    "kl_cov by default": Formula("kl_cov", lambda c: _penalised_covariance(c, 2e-4, 1.0)),
    "clip_b": Formula(
        "clip_b", lambda c: _without_lowest_discriminants(c, 0.3), keys={"masks": [{"name": "clip_b", "mu": 0.3}]}
    ),
    "clip_v": Formula(
        "clip_v",
        lambda c: _without_greatest_differences(c, 0.3, 0.02),
        keys={"masks": [{"name": "clip_v", "mu": 0.3, "max_share": 0.02}]},
    ),
    "high_entropy": Formula("high_entropy", _forking),
    "skywork_or1": Formula("skywork_or1", lambda c: token_mean(surrogate(c, adv.grpo(c)))),
    "pass_at_k": Formula(
        "pass_at_k", lambda c: token_mean(surrogate(c, adv.pass_at_k(c, 3))), keys={"advantage": {"k": 3}}
    ),
    "lite_ppo": Formula("lite_ppo", lambda c: token_mean(surrogate(c, adv.over_the_batchs_deviation(c)))),
    "m2po": Formula("m2po", _second_moment, noise=0.4),
    "gpg": Formula(
        "gpg", lambda c: token_mean(_differing(c, _likelihood(c, adv.mean_baseline(c)), adv.uniform_groups(c)))
    ),
    "dppo": Formula("dppo", lambda c: token_mean(_in_total_variation(c)), noise=1.0),
    "gdpo": Formula("gdpo", lambda c: sequence_mean(surrogate(c, adv.parts(c)))),
    "gdpo without a part": Formula(
        "gdpo", lambda c: sequence_mean(surrogate(c, adv.parts(c))), prepare=_without_a_part
    ),
    "gdpo differing groups": Formula(
        "gdpo",
        lambda c: sequence_mean(_differing(c, surrogate(c, adv.parts(c)), adv.uniform_parts(c))),
        prepare=_equal_sums_of_parts,
        keys={"drop_uniform_groups": True},
    ),
    "stepwise_grpo": Formula(
        "stepwise_grpo", lambda c: sequence_mean(surrogate(c, adv.stepwise(c))), prepare=_one_reward_per_episode
    ),
    "gigpo": Formula("gigpo", lambda c: sequence_mean(surrogate(c, adv.group_in_group(c)))),
    "sft": Formula("sft", _imitation),
    "mix": Formula("mix", lambda c: 0.9 * _surrogate_mean(c) + 0.1 * _imitation(c)),
    "chord": Formula("chord", lambda c: 0.1 * _surrogate_mean(c) + 0.9 * _unsure_imitation(c)),
    "dpo": Formula("dpo", lambda c: torch.log(1 + torch.exp(-0.1 * _margins(c))).mean()),
    "ipo": Formula("dpo", lambda c: ((_margins(c) - 1 / (2 * 0.1)) ** 2).mean(), keys={"loss": "ipo"}),
    "orpo": Formula("orpo", _odds_ratio),
    "sft_is": Formula("sft_is", _expected_imitation),
    "sft_phi": Formula("sft_phi", _unsure_imitation),
    "sft_phi cutoff": Formula("sft_phi", lambda c: _unsure_imitation(c, 0.05), keys={"cutoff": 0.05}),
}
