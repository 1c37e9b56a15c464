"""Skywork-OR1: GRPO with a token mean and an entropy bonus that is active only while the entropy is low.

L = 1/sum_i T_i sum_i sum_t [-min(rho A_i, clip(rho) A_i) - alpha H], A_i as in GRPO
alpha = c if the entropy is at most .2 nats, else 0; c begins at 0, and each step becomes c + .005, or c - .005 above .2

The entropy is that of the previous step. Intended for on-policy updates without KL.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollmill.config.algorithm import EntropyControl, PolicyGradientOptions


class SkyworkOR1(PolicyGradientOptions):
    """Skywork-OR1: token mean and adaptive entropy control."""

    source: ClassVar[str] = "arXiv:2505.22312"

    name: Literal["skywork_or1"] = "skywork_or1"
    entropy_control: EntropyControl | None = EntropyControl()
