"""`algorithm.corrections`: importance weights for tokens that the old policy did not sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, module_sections, section_union


class CorrectionSection(NamedSection):
    """Base of importance corrections: a weight per token, from x = old / rollout probability. Several are
    multiplied."""


class TokenTIS(CorrectionSection):
    """min(x, cap) per token: truncated importance sampling."""

    implementation = "rollmill.algorithms.corrections:truncated_importance"
    name: Literal["tis"] = "tis"
    cap: float = Field(2.0, gt=0)
    """Upper bound of the weights."""


class SequenceTIS(CorrectionSection):
    """min(product of the completion's x, cap)."""

    implementation = "rollmill.algorithms.corrections:sequence_truncated_importance"
    name: Literal["sequence_tis"] = "sequence_tis"
    cap: float = Field(2.0, gt=0)
    """Upper bound of the weights."""


class TokenMIS(CorrectionSection):
    """x within [low, high], else 0 (IcePop, MIS)."""

    implementation = "rollmill.algorithms.corrections:masked_importance"
    name: Literal["mis"] = "mis"
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


class SequenceMIS(CorrectionSection):
    """The product of the completion's x within [low, high], else 0."""

    implementation = "rollmill.algorithms.corrections:sequence_masked_importance"
    name: Literal["sequence_mis"] = "sequence_mis"
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


class GeometricRejection(CorrectionSection):
    """1 where the geometric mean of the completion's x lies within [low, high], else 0."""

    implementation = "rollmill.algorithms.corrections:geometric_rejection"
    name: Literal["geometric"] = "geometric"
    low: float = Field(0.999, ge=0)
    """Completions with a smaller mean are excluded."""
    high: float = Field(1.001, gt=0)
    """Completions with a larger mean are excluded."""


class K3Rejection(CorrectionSection):
    """1 where the completion's mean k3 between rollout and old policy is at most `bound`, else 0."""

    implementation = "rollmill.algorithms.corrections:k3_rejection"
    name: Literal["k3"] = "k3"
    bound: float = Field(0.01, gt=0)
    """Completions with a larger mean are excluded."""


class DecoupledCorrection(CorrectionSection):
    """x up to `cap` (decoupled PPO, AReaL)."""

    implementation = "rollmill.algorithms.corrections:decoupled_importance"
    name: Literal["decoupled"] = "decoupled"
    cap: float = Field(5.0, gt=0)
    """Largest accepted weight."""
    beyond: Literal["mask", "cap"] = "mask"
    """Replacement of larger weights: 0 (`mask`), or `cap`."""


class OffPolicyMask(CorrectionSection):
    """0 for completions with negative advantage whose mean log(rollout / policy) exceeds `delta`, else 1."""

    implementation = "rollmill.algorithms.corrections:off_policy_sequence_mask"
    name: Literal["off_policy_mask"] = "off_policy_mask"
    delta: float = Field(0.1, ge=0)
    """Largest accepted mean of log(rollout) - log(policy), in nats."""


if TYPE_CHECKING:
    CorrectionConfig = CorrectionSection
else:
    CorrectionConfig = section_union(module_sections(__name__, CorrectionSection))
