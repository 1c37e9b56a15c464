"""The format reward."""

from __future__ import annotations

import re

from rollmill.config.reward import FormatReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import Verdict


class Format:
    """1 if the completion matches a regular expression, else 0."""

    def __init__(self, config: FormatReward) -> None:
        pattern = re.compile(config.pattern, re.DOTALL)
        self._matches = pattern.fullmatch if config.whole else pattern.search

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        return Verdict(float(self._matches(completion.text) is not None))
