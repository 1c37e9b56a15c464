"""Length rewards: Kimi k1.5's within a group, DAPO's at the end of the context, and a target length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.config.rewards import Reward
from rollmill.errors import RewardError
from rollmill.rewards.base import LATE, TIMEOUT, RewardResult, Score
from rollmill.rewards.text.parsing import completion_length
from rollmill.types import Completion, Task


class LengthReward(Reward):
    """Length reward in tokens of the whole completion, reasoning included (in words if a completion has no tokens)."""

    name: Literal["length"]
    kind: Literal["kimi", "overlong", "target"]
    """`kimi`: within a group, from .5 for the shortest to -.5 for the longest; at most 0 for wrong ones. `overlong`
    (DAPO): 0, then falling to -1 over the last `buffer` tokens before `longest`. `target`: 1 at the task's column
    `target_length`, falling to 0 at twice that length and at length 0."""
    correct: str | None = None
    """Name of the reward that decides whether a completion is correct, such as `math` or `python_function/part`. Only
    with `kimi`."""
    threshold: float = 1.0
    """Minimum of that reward for a correct completion, before its weight. Only with `kimi`."""
    longest: int | None = Field(None, ge=1)
    """Maximum length (L_max), usually rollout.max_new_tokens. Only with `overlong`."""
    buffer: int | None = Field(None, ge=1)
    """Number of tokens over which the penalty grows (L_cache); published: a fifth of `longest`. Only with
    `overlong`."""
    target: int | None = Field(None, ge=1)
    """Target length of tasks without a column `target_length`. Only with `target`."""

    @property
    def largest(self) -> float:  # type: ignore[override]
        """Largest value: by kind."""
        return {"kimi": 0.5, "overlong": 0.0, "target": 1.0}[self.kind]

    @model_validator(mode="after")
    def _of_the_kind(self) -> Self:
        keys = {"kimi": ("correct", "threshold"), "overlong": ("longest", "buffer"), "target": ("target",)}
        for kind, own in keys.items():
            for key in own:
                if kind != self.kind and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is honoured by kind {kind}, not by {self.kind}; remove it")
        if self.kind == "kimi" and self.correct is None:
            raise ValueError("which reward says that a completion is correct? Give its name as correct, as in math")
        if self.kind == "overlong":
            if self.longest is None or self.buffer is None:
                raise ValueError("kind overlong needs longest and buffer, as in longest: 1024, buffer: 200")
            if self.buffer > self.longest:
                raise ValueError(f"buffer ({self.buffer}) is above longest ({self.longest}); lower it")
        return self

    @property
    def scope(self) -> Literal["completion", "group"]:  # type: ignore[override]
        return "group" if self.kind == "kimi" else "completion"

    def other_rewards(self) -> dict[str, str]:
        return {} if self.correct is None else {"correct": self.correct}

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return the score of kind `overlong` or `target`. The task's column `target_length` overrides `target`."""
        length = completion_length(completion)
        if self.kind == "overlong":
            assert self.longest is not None
            assert self.buffer is not None
            return Score(soft_overlong_penalty(length, self.longest, self.buffer))
        target = task.metadata.get("target_length", self.target)
        if target is None:
            return Score(None)
        if isinstance(target, bool) or not isinstance(target, int) or target < 1:
            raise ValueError(f"the task's column `target_length` is {target!r:.80}; expected a number of at least 1")
        return Score(max(0.0, 1 - abs(length - target) / target))

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Return the scores of kind `kimi`: shorter is better within a group, and a wrong completion gains nothing."""
        lengths = [completion_length(completion) for completion in completions]
        return [Score(share) for share in kimi_length_scores(lengths, [self._is_correct(each) for each in judged])]

    def _is_correct(self, result: RewardResult) -> bool | None:
        """Return whether the reward `correct` counts it as correct; None if that reward does not apply.

        Raises RewardError if there is no reward of that name.
        """
        name = self.correct
        assert name is not None
        if name not in result.parts:
            late = result.outcomes.get(name.partition("/")[0]) in (TIMEOUT, LATE)
            if late or result.failed_gate is not None:
                return False
            raise RewardError(
                f"correct: no reward `{name}` for single completions; there are {', '.join(result.parts)}"
            )
        value = result.parts[name]
        return None if value is None else value >= self.threshold


def kimi_length_scores(lengths: Sequence[int], correct: Sequence[bool | None]) -> list[float | None]:
    """Return the length rewards of a group (Kimi k1.5, arXiv:2501.12599, 2.3.3).

    lambda = .5 - (length - min) / (max - min) over the lengths of the group; a correct completion earns lambda, a wrong
    one min(0, lambda), and all earn 0 if all are equally long. None if `correct` is None.
    """
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    shares = [0.5 - (length - shortest) / spread if spread else 0.0 for length in lengths]
    return [
        None if right is None else share if right else min(0.0, share)
        for share, right in zip(shares, correct, strict=True)
    ]


def soft_overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    0 up to L_max - L_c, then ((L_max - L_c) - length) / L_c, and -1 past L_max.
    """
    return min(0.0, max(-1.0, (longest - buffer - length) / buffer))
