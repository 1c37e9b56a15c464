"""`algorithm.masks`: tokens that the policy loss leaves out, chosen over a whole optimizer step.

Each name is a function of `rollmill.algorithms.entropy` or `rollmill.algorithms.trust_region`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollmill.config.parts import NamedSection


class MaskSection(NamedSection):
    """Which tokens of an optimizer step the policy loss keeps. Masked tokens still count in the denominator."""

    uses_old: ClassVar[bool] = False  #: looks at the old log-probs
    uses_expected_discriminant: ClassVar[bool] = False


class HighEntropyMask(MaskSection):
    """Keeps the tokens with the highest entropy (80/20 rule)."""

    name: Literal["high_entropy"] = "high_entropy"
    top: float = Field(0.2, gt=0, le=1)
    """Share of the step's tokens that is kept."""


class ClipBMask(MaskSection):
    """Leaves out tokens with A < 0 whose push would lower the entropy far more than the step's mean (Clip_B)."""

    name: Literal["clip_b"] = "clip_b"
    mu: float = Field(2.5, ge=0)
    """Standard deviations of p (H + log p) below the step's mean that are still accepted."""


class ClipVMask(MaskSection):
    """Leaves out tokens with A < 0 that do so compared with the vocabulary at their own place (Clip_V)."""

    uses_expected_discriminant: ClassVar[bool] = True

    name: Literal["clip_v"] = "clip_v"
    mu: float = Field(8.5, ge=0)
    """Standard deviations of the difference that are still accepted."""
    max_share: float = Field(1e-4, ge=0, le=1)
    """At most this share of the step's tokens is left out, but always room for one."""


class ClipCovMask(MaskSection):
    """Leaves out a few random tokens whose log-prob and advantage covary (Clip-Cov)."""

    uses_old: ClassVar[bool] = True

    name: Literal["clip_cov"] = "clip_cov"
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the step's tokens that is left out; at least one."""
    low: float = 1.0
    """Tokens with a covariance up to this are kept."""
    high: float = 5.0
    """Tokens with a covariance from this on are kept."""


class SecondMomentMask(MaskSection):
    """Leaves out the tokens with the greatest log-ratios until their second moment is small (M2PO)."""

    uses_old: ClassVar[bool] = True

    name: Literal["second_moment"] = "second_moment"
    threshold: float = Field(0.04, ge=0)
    """Mean of the squared log-ratios that the tokens which move further away may have."""


MaskConfig = Annotated[
    HighEntropyMask | ClipBMask | ClipVMask | ClipCovMask | SecondMomentMask,
    Field(discriminator="name"),
]
