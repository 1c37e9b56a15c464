"""Operators that leave experiences out."""

from __future__ import annotations

from typing import Literal

from rollmill.config.operators.base import OperatorSection


class RewardFilter(OperatorSection):
    """Keeps completions whose reward lies within bounds."""

    name: Literal["reward_filter"] = "reward_filter"
    at_least: float | None = None
    """Drop completions that earn less."""
    at_most: float | None = None
    """Drop completions that earn more."""
