"""The exact-match reward."""

from __future__ import annotations

from rollmill.config.rewards import ExactReward
from rollmill.rewards.base import OK, Score, text_after
from rollmill.types import Completion, Task


class ExactScorer:
    """1 if the answer string equals the reference string, else 0. A task without an answer is not judged."""

    def __init__(self, config: ExactReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Score:
        if task.answer is None:
            return Score(None)
        answer = text_after(completion.text, self._config.after)
        if answer is None:
            return Score(0.0, "no_answer")
        return Score(float(self._folded(answer) == self._folded(str(task.answer))), OK)

    def _folded(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.ignore_case else text
