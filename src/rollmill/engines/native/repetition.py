"""Endless repetition, found as tokens arrive."""

from __future__ import annotations

import numpy as np

from rollmill.config.rollout import RepetitionConfig


class RepetitionDetector:
    """Watches one completion. A token costs a comparison with each of the last `period` tokens."""

    def __init__(self, config: RepetitionConfig) -> None:
        periods = np.arange(1, config.period + 1)
        self._needed = np.maximum((config.times - 1) * periods, config.tokens - periods)
        self._recent = np.full(config.period, -1)  # the latest first
        self._runs = np.zeros(config.period, np.int64)  # by period: how many tokens in a row equal the one before it

    def add(self, token: int) -> bool:
        """Whether the latest tokens now are one stretch, said often enough in a row."""
        self._runs = (self._runs + 1) * (self._recent == token)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._runs >= self._needed).any())
