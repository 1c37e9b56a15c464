"""Off-policy policy gradients, mirror descent, and imitation of the best completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rollmill.config.algorithms.base import AdvantageSection, Aggregation, LossSection, PolicyGradientOptions
from rollmill.config.algorithms.baselines import MeanBaseline, PolicyGradientLoss

if TYPE_CHECKING:
    from rollmill.config.algorithms.base import AdvantageConfig, LossConfig


class TOPRLoss(LossSection):
    """-w A log pi, w = 1 for A >= 0, else the completion's ratio, at most 1 (TOPR)."""

    implementation = "rollmill.algorithms.sequence_losses:topr"
    name: Literal["topr"] = "topr"


class TOPR(PolicyGradientOptions):
    """TOPR: full weight for good completions, the truncated ratio for bad ones."""

    source = "arXiv:2503.14286"
    formula = """
    TOPR: tapered off-policy REINFORCE, stable on old data.

    L = 1/N sum_i sum_t -w_i A_i log pi; w_i = 1 where A_i >= 0, else min(prod_t rho_t, 1); A_i = r_i - mean
    """

    name: Literal["topr"] = "topr"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = TOPRLoss()
    aggregation: Aggregation = "sequence-sum-mean"
    proximal: Literal["auto", "rollout", "recompute", "interpolate"] = "rollout"


class ShiftedBaseline(AdvantageSection):
    """r - (mean - beta) within the group: successes weigh more than failures (AsymRE)."""

    implementation = "rollmill.algorithms.advantages:asymre"
    name: Literal["asymre"] = "asymre"
    beta: float = 0.1
    """Offset of the baseline below the group's mean."""
    keep_uniform: bool = False
    """Give groups with equal rewards the advantage beta, as in the formula, instead of 0."""


class AsymRE(PolicyGradientOptions):
    """AsymRE: a baseline below the mean weights successes more than failures."""

    source = "arXiv:2506.20520"
    formula = """
    AsymRE: off-policy REINFORCE with a lowered baseline.

    A_i = r_i - (mean - beta) within the group
    L = 1/N sum_i sum_t -A_i log pi
    """

    name: Literal["asymre"] = "asymre"
    advantage: AdvantageConfig = ShiftedBaseline()
    loss: LossConfig = PolicyGradientLoss()
    aggregation: Aggregation = "sequence-sum-mean"


class MirrorBaseline(AdvantageSection):
    """r minus the group's mean, or minus tau log(mean(exp(r / tau))) (OPMD, Kimi k1.5)."""

    implementation = "rollmill.algorithms.advantages:opmd"
    name: Literal["opmd"] = "opmd"
    baseline: Literal["mean", "logavgexp"] = "mean"
    """The group's mean, or its estimate of tau log Z."""
    tau: float = Field(1.0, gt=0)
    """Temperature of `logavgexp`; a small value moves the baseline towards the best reward."""

    def unused_keys(self) -> dict[str, str]:
        return {"tau": "not honoured with baseline `mean`; it is with `logavgexp`"} if self.baseline == "mean" else {}


class OPMDLoss(LossSection):
    """-A log pi / (1 + tau) (OPMD)."""

    uses_old = False

    implementation = "rollmill.algorithms.losses:opmd"
    name: Literal["opmd"] = "opmd"
    tau: float = Field(1.0, ge=0)
    """Weight of the KL to the old policy that the update is derived with."""


class OPMD(PolicyGradientOptions):
    """OPMD: r - mean within the group, -A log pi / (1 + tau)."""

    source = "arXiv:2505.17826"
    formula = """
    OPMD: online policy mirror descent, as simplified by Trinity-RFT: no ratio, no clipping.

    A_i = r_i - mean within the group, or r_i - tau log(mean(exp(r / tau)))
          (`advantage: {name: opmd, baseline: logavgexp}`)
    L = 1/sum_i T_i sum_i sum_t -A_i log pi / (1 + tau)
    """

    name: Literal["opmd"] = "opmd"
    advantage: AdvantageConfig = MirrorBaseline()
    loss: LossConfig = OPMDLoss()


class KimiMirrorLoss(LossSection):
    """(A - tau sum_t log rho_t)^2 per completion (Kimi k1.5)."""

    follows_advantage = False

    implementation = "rollmill.algorithms.sequence_losses:kimi_mirror"
    name: Literal["kimi_mirror"] = "kimi_mirror"
    tau: float = Field(0.1, gt=0)
    """Weight of the KL to the old policy that the update is derived with."""


class Kimi(PolicyGradientOptions):
    """Kimi k1.5: squared distance between advantage and log-ratio, the optimizer reset every step."""

    source = "arXiv:2501.12599"
    formula = """
    Kimi k1.5's online mirror descent.

    L = 1/N sum_i (r_i - mean - tau sum_t log rho_t)^2

    rho is relative to the policy at the start of the step, where the optimizer is reset. Set
    `trainer.updates_per_batch` above 1.
    """

    name: Literal["kimi"] = "kimi"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = KimiMirrorLoss()
    aggregation: Aggregation = "sequence-mean"
    reset_optimizer: bool = True


class SPPOLoss(LossSection):
    """(sum_t log rho_t - A / beta)^2 per completion (self-play preference optimisation)."""

    follows_advantage = False

    implementation = "rollmill.algorithms.sequence_losses:sppo"
    name: Literal["sppo"] = "sppo"
    beta: float = Field(1e-3, gt=0)
    """Divisor of the advantages: 1 / eta of the paper."""


class SPPO(PolicyGradientOptions):
    """SPPO: completions' log-ratios fitted to A / beta. (Trinity-RFT's `sppo` is the loss `softmax_ppo`.)"""

    source = "arXiv:2405.00675"
    formula = """
    SPPO: self-play preference optimisation; the log-ratio is fitted to the estimated win probability.

    L = 1/N sum_i (sum_t log rho_t - A_i / beta)^2, A_i = r_i - mean

    With 0/1 rewards A_i is twice the win probability against the group minus 1; the paper has the probability minus
    1/2. beta absorbs the factor.
    """

    name: Literal["sppo"] = "sppo"
    advantage: AdvantageConfig = MeanBaseline()
    loss: LossConfig = SPPOLoss()
    aggregation: Aggregation = "sequence-mean"


class SoftmaxPPOLoss(LossSection):
    """-A log clip(rho, 1 / (1 + clip), 1 + clip) (sPPO)."""

    implementation = "rollmill.algorithms.losses:softmax_ppo"
    name: Literal["softmax_ppo"] = "softmax_ppo"
    clip: float = Field(0.3, gt=0)
    """Clipping range of the ratio."""


class BestOfGroup(AdvantageSection):
    """1 for accepted completions and 0 for the others (RAFT)."""

    compares_groups = False

    implementation = "rollmill.algorithms.advantages:best_of_group"
    name: Literal["best_of_group"] = "best_of_group"
    accept: Literal["best", "all"] = "best"
    """`best`: the best of each group, the first one of ties. `all`: every completion above `threshold`."""
    threshold: float | None = None
    """Completions with a reward up to this are never accepted. Default: no threshold."""

    @model_validator(mode="after")
    def _rejects_something(self) -> BestOfGroup:
        if self.accept == "all" and self.threshold is None:
            raise ValueError("accept `all` rejects nothing without a `threshold`; give one: 0 accepts positive rewards")
        return self


class RAFTLoss(LossSection):
    """-log pi of the tokens with a positive advantage; the others are excluded from the denominator (RAFT)."""

    only_positive = True
    uses_old = False

    implementation = "rollmill.algorithms.losses:raft"
    name: Literal["raft"] = "raft"


class RAFT(PolicyGradientOptions):
    """RAFT: imitates the best completion of each group."""

    source = "arXiv:2304.06767"
    formula = """
    RAFT: supervised fine-tuning on the policy's own best completions (algorithm 1).

    L = 1/sum_i T_i sum_i sum_t -log pi, i over the accepted completions: the best of each group

    `advantage: {threshold: 0}` accepts none of a group whose best reward is 0. `{accept: all, threshold: 0}` accepts
    every completion with a positive reward, as arXiv:2504.11343 does for rewards of 0 and 1.
    """

    name: Literal["raft"] = "raft"
    advantage: AdvantageConfig = BestOfGroup()
    loss: LossConfig = RAFTLoss()
