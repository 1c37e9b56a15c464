"""Preference losses: terms per pair [pairs] or completion [N], to be minimised; their mean is the published loss.

`chosen` and `rejected` are log-probs of whole completions under the policy being trained, `reference_*` under the
frozen one, all [pairs]: sums over tokens, or means in length-normalised forms. `pair_logprobs` computes them from
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollmill.algorithms.aggregation import mean_by_sequence, sum_by_sequence


def pair_logprobs(
    logprob: Tensor, sequence: Tensor, pair: Tensor, chosen: Tensor, *, mean: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of the chosen and of the rejected completion of each pair, [pairs] each, from flat tokens.

    Args:
        logprob: [tokens].
        sequence: int64 [tokens], index of the token's sequence among N.
        pair: int64 [N], 0 .. pairs - 1; each occurs twice, once with `chosen` True.
        chosen: bool [N].
        mean: average over tokens instead of summing.
    """
    by_sequence = (mean_by_sequence if mean else sum_by_sequence)(logprob, sequence, len(pair))
    pairs = len(pair) // 2
    return (
        sum_by_sequence(by_sequence[chosen], pair[chosen], pairs),
        sum_by_sequence(by_sequence[~chosen], pair[~chosen], pairs),
    )


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h the difference of log-ratios. [pairs].

    DPO (arXiv:2305.18290) where e, `label_smoothing`, is 0; else cDPO, which assumes that a preference is flipped with
    probability e. Published with sums over tokens; with means it is length-normalised DPO (arXiv:2411.15124),
    which needs a greater beta (5 there).
    """
    margin = beta * _log_ratio_difference(chosen, rejected, reference_chosen, reference_rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """(h - 1 / (2 beta))^2, h the difference of log-ratios (IPO, arXiv:2310.12036, eq. 17; beta is its tau). [pairs].

    The paper sums over tokens; with means, as in TRL, the target stays within reach of long completions.
    """
    return (_log_ratio_difference(chosen, rejected, reference_chosen, reference_rejected) - 1 / (2 * beta)) ** 2


def log_odds(mean_logprob: Tensor) -> Tensor:
    """log(p / (1 - p)), p = exp(mean_logprob). [N].

    Args:
        mean_logprob: mean over a completion's tokens, clamped to at most -1e-6 to keep the odds finite.
    """
    logprob = mean_logprob.clamp(max=-1e-6)
    # log(1 - p) is exact for p near 1 by expm1 and for p near 0 by log1p
    near_one = logprob > -0.6931
    below = torch.where(near_one, logprob, -0.5)
    above = torch.where(near_one, -1.0, logprob)
    return logprob - torch.where(near_one, torch.log(-torch.expm1(below)), torch.log1p(-above.exp()))


def orpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(log(odds_chosen / odds_rejected)) (ORPO, arXiv:2403.07691, eq. 7). [pairs].

    The odds-ratio term alone; the published loss adds imitation of the chosen completion. `chosen` and `rejected` are
    means over tokens.
    """
    return -logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_d (1 - sigmoid(beta (r - z0))) where desirable, else w_u (1 - sigmoid(beta (z0 - r))). [N].

    KTO (arXiv:2402.01306, eq. 7).

    Args:
        log_ratio: r, [N]: log policy - log reference of a completion, summed over its tokens.
        desirable: bool [N].
        baseline: z0, a scalar: see `kto_baseline`.
    """
    gain = beta * (log_ratio - baseline.detach())
    return torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


def kto_baseline(mismatched_log_ratio: Tensor) -> Tensor:
    """z0 = max(0, mean over [N]), without gradient: estimates the KL divergence of the policy from the reference.

    Args:
        mismatched_log_ratio: log policy - log reference of completions paired with other prompts. [N].
    """
    return mismatched_log_ratio.detach().mean().clamp(min=0)


def bradley_terry(
    reward_chosen: Tensor, reward_rejected: Tensor, *, margin: Tensor | float = 0.0, centre_coefficient: float = 0.0
) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin) + centre_coefficient (r_chosen + r_rejected)^2. [pairs].

    For training reward models (arXiv:2203.02155, eq. 1; `margin`, a number or [pairs], as in arXiv:2307.09288; centring
    as in arXiv:2312.09244).
    """
    loss = -logsigmoid(reward_chosen - reward_rejected - margin)
    return loss + centre_coefficient * (reward_chosen + reward_rejected) ** 2


def _log_ratio_difference(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor
) -> Tensor:
    return (chosen - reference_chosen) - (rejected - reference_rejected)
