"""Preference pairs and labelled completions: for the policy, or for a reward model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.algorithms.base import OfflineAlgorithmOptions


class DPO(OfflineAlgorithmOptions):
    """Direct preference optimisation on pairs of a chosen and a rejected completion."""

    uses_pairs = True
    recipe = "rollmill.algorithms.preference_recipes:dpo"
    source = "arXiv:2305.18290"
    formula = """
    DPO: preferences without a reward model, and IPO.

    h = (lp_chosen - ref_chosen) - (lp_rejected - ref_rejected); lp: log-prob of a completion, a sum or mean over tokens
    L = 1/P sum over pairs of -log sigmoid(beta h)   (loss: sigmoid)   or   (h - 1 / (2 beta))^2   (loss: ipo)
    """

    name: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's own loss, or IPO's (arXiv:2310.12036)."""
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference. With `normalise` use greater values: 2 to 10."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability that a preference is flipped. Only with loss `sigmoid`."""
    normalise: bool = False
    """Take means over tokens instead of sums (length-normalised DPO, arXiv:2411.15124)."""
    sft: float = Field(0.0, ge=0)
    """Weight of an additional SFT term on the chosen completion."""

    @property
    def uses_reference(self) -> bool:
        """True: the loss compares with the policy at the start of the stage."""
        return True

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured by loss `ipo`; it is by `sigmoid`"
        return {"label_smoothing": text} if self.loss == "ipo" else {}


class ORPO(OfflineAlgorithmOptions):
    """Odds-ratio preference optimisation on pairs of a chosen and a rejected completion."""

    uses_pairs = True
    recipe = "rollmill.algorithms.preference_recipes:orpo"
    source = "arXiv:2403.07691"
    formula = """
    ORPO: imitation of the chosen completion plus a penalty on the odds of the rejected one, without a reference.

    p = exp(mean over tokens of log pi) of a completion;   odds = p / (1 - p)
    L = 1/P sum over pairs of -log p_chosen - weight log sigmoid(log(odds_chosen / odds_rejected))
    """

    name: Literal["orpo"] = "orpo"
    weight: float = Field(0.1, ge=0)
    """Weight of the odds-ratio term (lambda of the paper, beta in TRL)."""


class KTO(OfflineAlgorithmOptions):
    """Kahneman-Tversky optimisation on completions with a label: desirable or undesirable."""

    uses_labels = True
    recipe = "rollmill.algorithms.preference_recipes:kto"
    source = "arXiv:2402.01306"
    formula = """
    KTO: single completions labelled desirable or undesirable, without pairs.

    r = sum_t log (pi / ref) of a completion
    z0 = max(0, mean over the optimizer step of r(x_i, y_j)), without gradient
    L = 1/N sum over completions of w_d (1 - sigmoid(beta (r - z0)))   (desirable)
                                 or w_u (1 - sigmoid(beta (z0 - r)))   (undesirable)

    (x_i, y_j) is mismatched: the prompt of one completion with the tokens of another one of the batch. z0 estimates the
    KL divergence of the policy from the reference.
    """

    name: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable completions. If the classes are unbalanced, weight times count should be 1 to 1.33 times that
    of the undesirable ones."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable completions."""

    @property
    def uses_reference(self) -> bool:
        """True: the loss compares with the policy at the start of the stage."""
        return True

    def describe_imbalance(self, desirable: int, undesirable: int) -> str:
        """Compares the classes by weight times count (arXiv:2402.01306, eq. 9)."""
        if not desirable or not undesirable:
            kind = "undesirable" if desirable else "desirable"
            return f"no completion is {kind}, and algorithm kto compares the two kinds"
        ratio = self.desirable_weight * desirable / (self.undesirable_weight * undesirable)
        if 1 <= ratio <= 4 / 3:
            return ""
        weight = undesirable * self.undesirable_weight / desirable
        return (
            f"{desirable} desirable and {undesirable} undesirable completions with weights {self.desirable_weight:g} "
            f"and {self.undesirable_weight:g} stand in a ratio of {ratio:.2f}; kto's authors advise 1 to 1.33: "
            f"algorithm.desirable_weight {weight:.3g} to {weight * 4 / 3:.3g}"
        )

    def conflicts(self) -> dict[str, str]:
        text = "kto compares each completion with those of other prompts, and 1 has no other; give at least 2"
        return {"batch": text} if self.batch < 2 else {}


class RewardModel(OfflineAlgorithmOptions):
    """Train a copy of the policy's network to score the chosen completion of a pair above the rejected one.

    The policy is not changed. Each checkpoint holds the reward model in the folder `reward_model`.
    """

    uses_pairs = True
    trains_policy = False
    source = "arXiv:2203.02155"
    formula = """
    A reward model: one score per completion, from preferences (Bradley-Terry).

    r = w . h_last: a linear head without bias on the hidden state of the completion's last token
    L = 1/P sum over pairs of -log sigmoid(r_chosen - r_rejected - margin)
                              + centre_coefficient (r_chosen + r_rejected)^2
    """

    name: Literal["reward_model"] = "reward_model"
    margin: float = Field(0.0, ge=0)
    """Margin by which the chosen score should exceed the rejected one (arXiv:2307.09288)."""
    centre_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244)."""
