"""School questions in English and Chinese: what is asked, where the answer stands, and a rule per type."""

from rollmill.rewards.k12.reward import K12Scorer

__all__ = ["K12Scorer"]
