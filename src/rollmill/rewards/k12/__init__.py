"""The K-12 reward: school questions in English and Chinese, with a rule per question type."""

from rollmill.rewards.k12.reward import K12Scorer

__all__ = ["K12Scorer"]
