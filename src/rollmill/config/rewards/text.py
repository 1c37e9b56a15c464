"""`rewards`: rules on the text of a completion."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection


class ExactReward(RewardSection):
    """1 if the answer string equals the reference string."""

    name: Literal["exact"]
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    strip: bool = True
    """Ignore leading and trailing white space."""
    after: str | None = None
    """Compare only what follows the last occurrence of this text, for example "Answer:"."""


class FormatReward(RewardSection):
    """1 if the completion matches."""

    name: Literal["format"]
    pattern: str
    """Regular expression (Python's syntax, DOTALL) that must match."""
    whole: bool = False
    """Match the whole completion instead of anywhere in it."""
    time_limit_s: float = Field(0.2, gt=0)
    """Hard limit for one completion; some patterns take exponential time. Past it the outcome is `timeout`."""
