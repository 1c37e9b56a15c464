"""KTO: single completions labelled desirable or undesirable, without pairs.

r = sum_t log (pi / ref) of a completion;   z0 = max(0, mean over the optimizer step of r(x_i, y_j)), without gradient
L = 1/N sum over completions of w_d (1 - sigmoid(beta (r - z0)))   (desirable)
                             or w_u (1 - sigmoid(beta (z0 - r)))   (undesirable)

(x_i, y_j) is mismatched: the prompt of one completion with the tokens of another one of the batch. z0 estimates the
KL divergence of the policy from the reference.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.algorithm import OfflineAlgorithmOptions


class KTO(OfflineAlgorithmOptions):
    """Kahneman-Tversky optimisation on completions with a label: desirable or undesirable."""

    uses_labels: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv:2402.01306"

    name: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of desirable completions. If the classes are unbalanced, weight times count should be 1 to 1.33 times that
    of the undesirable ones."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of undesirable completions."""
