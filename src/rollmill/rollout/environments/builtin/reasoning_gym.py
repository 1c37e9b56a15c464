"""Several attempts at a reasoning-gym task."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.environments import EnvironmentSection
from rollmill.errors import ConfigError
from rollmill.rewards.base import text_after
from rollmill.rollout.environments.base import StepResult
from rollmill.types import Task


class ReasoningGymEnvironment(EnvironmentSection):
    """Several attempts at a task of `taskset.generator`, with feedback after a wrong answer.

    The reward is the generator's score of the last answer. With one attempt, it is equivalent to workflow `single_turn`
    with the reward `reasoning_gym`.
    """

    needs_generator: ClassVar[bool] = True
    needs_extra = ("reasoning", "reasoning_gym")
    name: Literal["reasoning_gym"] = "reasoning_gym"
    attempts: int = Field(3, ge=1)
    """Maximum number of answers."""
    after: str | None = None
    """The answer is the text after the last occurrence of this marker; null: the whole reply."""
    solved: float = Field(1.0, gt=0, le=1)
    """Score at which the episode ends."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of the reward per previous attempt."""
    feedback: str = "That is not right. Try again."
    """Message to the policy after a wrong answer."""
    _entry: dict[str, Any] = PrivateAttr()
    _score: Any = PrivateAttr()
    _tried: int = PrivateAttr()

    def reset(self, task: Task, seed: int) -> str:
        """Start an episode; the task's prompt asks the question, so there is no text.

        Raises ConfigError for a task that reasoning-gym did not generate.
        """
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
        answer, score = text_after(action, self.after), 0.0
        if answer is not None:
            score = self._scored(answer.strip())
        earned = score * self.discount**self._tried
        self._tried += 1
        done = score >= self.solved or self._tried == self.attempts
        feedback = "" if done else self.feedback
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
