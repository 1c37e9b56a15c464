"""`rewards`: what judges a completion. Each entry is one part; the reward is the weighted sum of the parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rollmill.config.base import Section

AnswerPlace = Literal["auto", "boxed", "hash", "last_number"]


class _Reward(Section):
    weight: float = 1.0
    """Factor of this part in the sum."""


class MathReward(_Reward):
    """1 if the final answer equals the reference (math-verify, in a grader process with a hard time limit), else 0."""

    name: Literal["math"]
    time_limit_s: float = Field(1.5, gt=0)
    """Hard limit for one answer; past it the grader process is killed and the outcome is `timeout`."""
    timeout_reward: float = 0.0
    """Reward of a timed-out judgement."""
    extract: AnswerPlace = "auto"
    """Where the answer stands: the last \\boxed{}, after `####`, the last number, or the first of these found."""
    extract_by_taskset: dict[str, AnswerPlace] = {}
    """Same for single tasksets, by the name of file (without suffix), generator or function."""
    tolerance: float = Field(0.0, ge=0, lt=1)
    """Relative difference that numbers may have. At 0, 0.3333 is not 1/3."""
    units: Literal["optional", "required"] = "optional"
    """Whether an answer without the unit or percent sign of the reference is right. A wrong unit never is."""

    def of_task(self, taskset: str, metadata: Mapping[str, Any]) -> MathReward:
        """The settings for one task: of its taskset, and of its own column `math`.

        Raises ValueError where the column is a mapping with other keys than extract, tolerance and units.
        """
        changes: dict[str, Any] = {}
        if taskset in self.extract_by_taskset:
            changes["extract"] = self.extract_by_taskset[taskset]
        if isinstance(own := metadata.get("math"), Mapping):
            if unknown := own.keys() - {"extract", "tolerance", "units"}:
                raise ValueError(
                    f"the task's column `math` has {sorted(unknown)}; extract, tolerance and units go there"
                )
            changes |= own
        return self.model_validate(self.model_dump() | changes) if changes else self


class ExactReward(_Reward):
    """1 if the answer string equals the reference string."""

    name: Literal["exact"]
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""
    strip: bool = True
    """Ignore leading and trailing white space."""
    after: str | None = None
    """Compare only what follows the last occurrence of this text, for example "Answer:"."""


class FormatReward(_Reward):
    """1 if the completion matches."""

    name: Literal["format"]
    pattern: str
    """Regular expression (Python's syntax, DOTALL) that must match."""
    whole: bool = False
    """Match the whole completion instead of anywhere in it."""
    time_limit_s: float = Field(0.2, gt=0)
    """Hard limit for one completion; some patterns take exponential time. Past it the outcome is `timeout`, the reward
    0."""


class ReasoningGymReward(_Reward):
    """The score that reasoning-gym's own generator gives. Only for tasks of a `generator`."""

    name: Literal["reasoning_gym"]
    after: str | None = None
    """Score only what follows the last occurrence of this text."""
    time_limit_s: float = Field(10.0, gt=0)
    """Hard limit for one answer; past it the grader process is killed, the outcome is `timeout` and the score 0."""


class PythonReward(_Reward):
    """A user's function `(task, completion) -> float | dict | None`, plain or async."""

    name: Literal["python"]
    function: str
    """`FILE.py:NAME`, `package.module:NAME`, or the name of a reward that a plugin registers."""
    options: dict[str, Any] = {}
    """Keyword arguments passed on."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest wait for one judgement; past it the outcome is `timeout`."""
    timeout_reward: float = 0.0
    """Reward of a timed-out judgement."""


class ModelReward(_Reward):
    """The score of a reward model: a sequence classifier with one output."""

    name: Literal["model"]
    path: Path
    """A Hugging Face folder of a sequence classifier, such as RUN/checkpoints/step-N/reward_model."""
    batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass, padding included; one completion may have more."""


RewardConfig = Annotated[
    MathReward | ExactReward | FormatReward | ReasoningGymReward | PythonReward | ModelReward,
    Field(discriminator="name"),
]
