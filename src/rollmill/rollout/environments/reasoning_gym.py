"""Several attempts at a reasoning-gym task."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

from rollmill.config.environments import ReasoningGymSection
from rollmill.errors import ConfigError
from rollmill.rewards.base import text_after
from rollmill.rollout.environments.base import StepResult
from rollmill.types import Task


class ReasoningGymEnvironment:
    """Several attempts at a task of reasoning-gym, which scores them. The task's prompt asks the question, so `reset`
    returns no text."""

    def __init__(self, config: ReasoningGymSection) -> None:
        self._config = config
        self._entry: dict[str, Any] = {}
        self._score: Any = None
        self._tried = 0

    def reset(self, task: Task, seed: int) -> str:
        """Start an episode. Raises ConfigError for a task that reasoning-gym did not generate."""
        made_by, entry = task.metadata.get("reasoning_gym"), task.metadata.get("entry")
        if made_by is None or entry is None:
            raise ConfigError(
                f"environment reasoning_gym: task {task.id} was made by no generator; give taskset.generator"
            )
        self._score = _dataset(made_by["name"], pickle.dumps(made_by.get("options", {}))).score_answer
        self._entry, self._tried = entry, 0
        return ""

    def step(self, action: str) -> StepResult:
        """Score an answer. A missing or unreadable one is wrong."""
        answer, score = text_after(action, self._config.after), 0.0
        if answer is not None:
            score = self._scored(answer.strip())
        earned = score * self._config.discount**self._tried
        self._tried += 1
        done = score >= self._config.solved or self._tried == self._config.attempts
        feedback = "" if done else self._config.feedback
        return StepResult(feedback, earned if done else 0.0, done, {"score": score, "attempts": self._tried})

    def _scored(self, answer: str) -> float:
        if answer == self._entry["answer"]:
            return 1.0
        try:
            return float(self._score(answer=answer, entry=self._entry))
        except MemoryError:
            raise
        except Exception:  # some scorers raise on any text that they do not expect
            return 0.0


@cache
def _dataset(name: str, options: bytes) -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigError("environment reasoning_gym needs its library: pip install 'rollmill[reasoning]'") from error
    return reasoning_gym.create_dataset(name, **pickle.loads(options))
