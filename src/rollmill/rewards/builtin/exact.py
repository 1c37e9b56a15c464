"""The exact-match reward."""

from __future__ import annotations

from typing import Literal

from rollmill.config.rewards import Reward
from rollmill.rewards.base import NO_ANSWER, Score, find_answer
from rollmill.types import Completion, Task


class ExactReward(Reward):
    """1 if the answer, without reasoning, equals the reference string, else 0."""

    decides = True
    largest = 1.0
    name: Literal["exact"]
    ignore_case: bool = False
    """Ignore upper and lower case."""
    strip: bool = True
    """Ignore leading and trailing white space."""
    after: str | None = None
    """Compare only what follows the last occurrence of this text, for example "Answer:"."""

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return no score for a task without an answer."""
        if task.answer is None:
            return Score(None)
        answer = find_answer(completion, self.after)
        if answer is None:
            return Score(0.0, NO_ANSWER)
        return Score(float(self._folded(answer) == self._folded(str(task.answer))))

    def _folded(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
