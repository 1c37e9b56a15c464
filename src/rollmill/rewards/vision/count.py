"""The counting reward."""

from __future__ import annotations

from typing import Any

from rollmill.config.rewards import CountReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import Verdict
from rollmill.rewards.text.reading import judged_part
from rollmill.rewards.vision.figures import figure, last_number


class Count:
    """1 if the last number is the reference, else 0 or credit for being near. Outcome `no_answer`: no number."""

    def __init__(self, config: CountReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Verdict(None)
        gold = _reference(task.answer)
        text = judged_part(completion.text, config)
        count = None if text is None else last_number(text)
        if count is None:
            return Verdict(0.0, "no_answer")
        if config.credit == "exact":
            return Verdict(float(count == gold))
        return Verdict(max(0.0, 1 - abs(count - gold) / max(gold, 1.0)))


def _reference(answer: Any) -> float:
    found = None if isinstance(answer, bool) else figure(str(answer))
    if found is None or found.percent or found.value < 0:
        raise ValueError(f"the task's answer is {answer!r:.80}; the count reward needs a number of at least 0")
    return found.value
