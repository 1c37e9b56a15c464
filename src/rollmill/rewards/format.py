"""The format reward."""

from __future__ import annotations

import regex

from rollmill.config.rewards import FormatReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import TIMEOUT, Verdict


class Format:
    """1 if the completion matches a regular expression, else 0."""

    def __init__(self, config: FormatReward) -> None:
        pattern = regex.compile(config.pattern, regex.DOTALL)
        self._matches = pattern.fullmatch if config.whole else pattern.search
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        try:
            return Verdict(float(self._matches(completion.text, timeout=self._config.time_limit_s) is not None))
        except TimeoutError:
            return Verdict(self._config.timeout_reward, TIMEOUT)
