"""Losses of preference pairs: per-pair terms [pairs], to be minimised; their mean over pairs is the published loss.

`chosen` and `rejected` are log-probs of whole completions under the policy being trained, `reference_*` under the
frozen one, all [pairs]: sums over tokens, or means in length-normalised forms. `pair_logprobs` makes them from tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rollmill.algorithms.sequences import mean_by_sequence, sum_by_sequence


def pair_logprobs(
    logprob: Tensor, sequence: Tensor, pair: Tensor, chosen: Tensor, *, mean: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs of the chosen and of the rejected completion of each pair, [pairs] each, from flat tokens.

    Args:
        logprob: [tokens].
        sequence: int64 [tokens], which of N sequences the token belongs to.
        pair: int64 [N], 0 .. pairs - 1; each occurs twice, once with `chosen` True.
        chosen: bool [N].
        mean: over tokens, rather than the sum.
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

    DPO (arXiv:2305.18290) where e, `label_smoothing`, is 0; else cDPO, which takes a preference to be the wrong way
    round with chance e. Published with sums over tokens; with means it is length-normalised DPO (arXiv:2411.15124),
    which wants a greater beta (5 there).
    """
    margin = beta * _log_ratio_difference(chosen, rejected, reference_chosen, reference_rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float = 0.1
) -> Tensor:
    """(h - 1 / (2 beta))^2, h the difference of log-ratios (IPO, arXiv:2310.12036, eq. 17; beta is its tau). [pairs].

    The paper sums over tokens; means, as TRL takes them, keep the target in reach of long completions.
    """
    return (_log_ratio_difference(chosen, rejected, reference_chosen, reference_rejected) - 1 / (2 * beta)) ** 2


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
