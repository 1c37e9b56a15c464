"""`algorithm.corrections`: weights of tokens that another policy sampled. `rollmill.algorithms.corrections`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.parts import NamedSection


class CorrectionSection(NamedSection):
    """A weight per token, from x = old / rollout probability; several are multiplied."""


class TokenTIS(CorrectionSection):
    """min(x, cap) per token: truncated importance sampling."""

    name: Literal["tis"] = "tis"
    cap: float = Field(2.0, gt=0)
    """Weights above it are cut to it."""


class SequenceTIS(CorrectionSection):
    """min(product of the completion's x, cap)."""

    name: Literal["sequence_tis"] = "sequence_tis"
    cap: float = Field(2.0, gt=0)
    """Weights above it are cut to it."""


class TokenMIS(CorrectionSection):
    """x within [low, high], else 0 (IcePop, MIS)."""

    name: Literal["mis"] = "mis"
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


class SequenceMIS(CorrectionSection):
    """The product of the completion's x within [low, high], else 0."""

    name: Literal["sequence_mis"] = "sequence_mis"
    low: float = Field(0.5, ge=0)
    """Smaller weights become 0."""
    high: float = Field(5.0, gt=0)
    """Larger weights become 0."""


class GeometricRejection(CorrectionSection):
    """1 where the geometric mean of the completion's x lies within [low, high], else 0."""

    name: Literal["geometric"] = "geometric"
    low: float = Field(0.999, ge=0)
    """Completions with a smaller mean are left out."""
    high: float = Field(1.001, gt=0)
    """Completions with a larger mean are left out."""


class K3Rejection(CorrectionSection):
    """1 where the completion's mean k3 between rollout and old policy is at most `bound`, else 0."""

    name: Literal["k3"] = "k3"
    bound: float = Field(0.01, gt=0)
    """Completions further off are left out."""


class DecoupledCorrection(CorrectionSection):
    """x up to `cap` (decoupled PPO, AReaL)."""

    name: Literal["decoupled"] = "decoupled"
    cap: float = Field(5.0, gt=0)
    """The largest weight."""
    beyond: Literal["mask", "cap"] = "mask"
    """What happens to a larger one: it becomes 0, or `cap`."""


class OffPolicyMask(CorrectionSection):
    """0 for completions with negative advantage that the policy has moved away from by more than `delta`, else 1."""

    name: Literal["off_policy_mask"] = "off_policy_mask"
    delta: float = Field(0.1, ge=0)
    """Mean of log(rollout) - log(policy) that is still accepted, in nats."""


CorrectionConfig = Annotated[
    TokenTIS
    | SequenceTIS
    | TokenMIS
    | SequenceMIS
    | GeometricRejection
    | K3Rejection
    | DecoupledCorrection
    | OffPolicyMask,
    Field(discriminator="name"),
]
