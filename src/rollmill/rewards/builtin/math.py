"""The math reward: grades final answers with rollmill-grading, by the settings of the run file and of the task."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.rewards import Reward
from rollmill.rewards.base import MEMORY, NO_ANSWER, TIMEOUT, Score, find_answer, task_options
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.math_grader import MathGrader
    from rollmill_grading.verdict import Verdict

AnswerExtraction = Literal["auto", "boxed", "hash", "last_number"]


class MathReward(Reward):
    """1 if the final answer equals the reference (formulas by math-verify, in a grader process), else 0."""

    decides = True
    compares_answers = True
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
    _grader: MathGrader

    def setup(self, resources: RewardResources) -> None:
        from rollmill_grading.math_grader import MathGrader
        from rollmill_grading.symbolic import ALGEBRA

        self._grader = MathGrader(resources.graders_for(ALGEBRA), time_limit_s=self.time_limit_s)

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        """Return the score, or start a comparison in a grader process. A task without an answer has none.

        Outcomes besides ok: `no_answer`, `hedged`, `too_long`, `too_deep`, `too_costly`, `timeout`, `memory`.
        """
        if task.answer is None:
            return Score(None)
        _require_text_or_number(task.answer)
        options = self.of_task(task.taskset, task.metadata)
        if (text := find_answer(completion)) is None:
            return Score(0.0, NO_ANSWER)
        begun = self._grader.begin(
            text,
            task.answer,
            question=task.prompt,
            options=task_options(task.metadata),
            extract=options.extract,
            tolerance=options.tolerance,
            units=options.units,
        )
        return self._score_later(begun) if isinstance(begun, Awaitable) else self._score_of(begun)

    async def score(self, task: Task, completion: Completion) -> Score:
        begun = self.begin(task, completion)
        return begun if isinstance(begun, Score) else await begun

    async def _score_later(self, begun: Awaitable[Verdict]) -> Score:
        return self._score_of(await begun)

    def _score_of(self, verdict: Verdict) -> Score:
        value = self.timeout_reward if verdict.outcome in (TIMEOUT, MEMORY) else verdict.score
        return Score(value, verdict.outcome, verdict.queue_s, verdict.run_s)

    def of_task(self, taskset: str, metadata: Mapping[str, Any]) -> MathReward:
        """Return the settings of one task: those of its taskset, updated by its column `math`.

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


def _require_text_or_number(answer: object) -> None:
    """Raise TypeError if a task's answer is neither text nor a number, ValueError if it is empty."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise TypeError(f"the task's answer is {answer!r:.80} ({kind}); the math reward needs text or a number")
    if not str(answer).strip():
        raise ValueError("the task's answer is empty; give one, or null where the math reward does not apply")
