"""`rewards`: final answers of math tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rollmill.config.rewards.base import RewardSection

AnswerExtraction = Literal["auto", "boxed", "hash", "last_number"]


class MathReward(RewardSection):
    """1 if the final answer equals the reference (formulas by math-verify, in a grader process), else 0."""

    implementation = "rollmill.rewards.math:MathScorer"
    decides = True
    largest = 1.0
    name: Literal["math"]
    time_limit_s: float = Field(60.0, gt=0)
    """Guard against a hang in one answer, far above what a comparison takes: its steps are limited, so that no verdict
    depends on the load of the machine. The grader process is then killed and the outcome is `timeout`."""
    extract: AnswerExtraction = "auto"
    """Location of the answer after the reasoning: the last \\boxed{}, after `####`, or the last number. `auto`: the
    best evidence of a box, `####`, "the answer is" and the last conclusion, inside the last `<answer>...</answer>` if
    there is one."""
    extract_by_taskset: dict[str, AnswerExtraction] = {}
    """Extraction for individual tasksets, by the name of file (without suffix), generator or function."""
    tolerance: float = Field(0.0, ge=0, lt=1)
    """Accepted relative error of numbers. At 0, 0.3333 is not 1/3."""
    units: Literal["optional", "required"] = "optional"
    """Whether an answer may omit the unit or percent sign of the reference. A wrong unit is always wrong."""

    def of_task(self, taskset: str, metadata: Mapping[str, Any]) -> MathReward:
        """Returns the settings of one task: those of its taskset, updated by its column `math`.

        Raises ValueError if the column is a mapping with other keys than extract, tolerance and units.
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
    """The score of reasoning-gym's own scorer for the answer, without reasoning. Only for tasks of a `generator`."""

    needs_extra = ("reasoning", "reasoning_gym")
    implementation = "rollmill.rewards.reasoning_gym:ReasoningGymScorer"
    decides = True
    largest = 1.0
    name: Literal["reasoning_gym"]
    after: str | None = None
    """Score only what follows the last occurrence of this text."""
    time_limit_s: float = Field(10.0, gt=0)
    """Timeout of one answer; the grader process is then killed and the outcome is `timeout`."""
