"""`rewards`: final answers of mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection

AnswerExtraction = Literal["auto", "boxed", "hash", "last_number"]


class MathReward(RewardSection):
    """1 if the final answer equals the reference (math-verify, in a grader process with a hard time limit), else 0."""

    name: Literal["math"]
    time_limit_s: float = Field(1.5, gt=0)
    """Hard limit for one answer; past it the grader process is killed and the outcome is `timeout`."""
    extract: AnswerExtraction = "auto"
    """Where the answer stands: the last \\boxed{}, after `####`, the last number; `auto`: the best evidence of a box,
    `####`, "the answer is" and the last conclusion, inside the last `<answer>...</answer>`, where there is one."""
    extract_by_taskset: dict[str, AnswerExtraction] = {}
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


class ReasoningGymReward(RewardSection):
    """The score that reasoning-gym's own generator gives. Only for tasks of a `generator`."""

    name: Literal["reasoning_gym"]
    after: str | None = None
    """Score only what follows the last occurrence of this text."""
    time_limit_s: float = Field(10.0, gt=0)
    """Hard limit for one answer; past it the grader process is killed and the outcome is `timeout`."""
