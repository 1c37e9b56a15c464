"""Length rewards: Kimi k1.5's within a group, DAPO's at the end of the context, and a target length."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.config.rewards.text import LengthReward
from rollmill.errors import RewardError
from rollmill.rewards.base import LATE, TIMEOUT, RewardResult, Score
from rollmill.rewards.text.parsing import completion_length
from rollmill.types import Completion, Task


def build_length_scorer(config: LengthReward) -> KimiLengthScorer | OverlongScorer | TargetLengthScorer:
    """Build the reward of the configured kind."""
    if config.kind == "kimi":
        return KimiLengthScorer(config)
    return OverlongScorer(config) if config.kind == "overlong" else TargetLengthScorer(config)


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


class KimiLengthScorer:
    """Kimi k1.5 (arXiv:2501.12599, 2.3.3): shorter is better within a group, and a wrong completion gains nothing.

    Computed by `kimi_length_scores`.
    """

    def __init__(self, config: LengthReward) -> None:
        self._config = config

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        correct = [self._correct(each) for each in judged]
        lengths = [completion_length(completion) for completion in completions]
        return [Score(share) for share in kimi_length_scores(lengths, correct)]

    def _correct(self, result: RewardResult) -> bool | None:
        """Return whether the configured reward counts it as correct; None if that reward does not apply.

        Raises RewardError if there is no reward of that name.
        """
        name = self._config.correct
        assert name is not None
        if name not in result.parts:
            late = result.outcomes.get(name.partition("/")[0]) in (TIMEOUT, LATE)
            if late or result.failed_gate is not None:
                return False
            raise RewardError(
                f"correct: no reward `{name}` for single completions; there are {', '.join(result.parts)}"
            )
        value = result.parts[name]
        return None if value is None else value >= self._config.threshold


class OverlongScorer:
    """DAPO's soft overlong punishment: `soft_overlong_penalty`."""

    def __init__(self, config: LengthReward) -> None:
        assert config.longest is not None
        assert config.buffer is not None
        self._longest, self._buffer = config.longest, config.buffer

    async def score(self, task: Task, completion: Completion) -> Score:
        return Score(soft_overlong_penalty(completion_length(completion), self._longest, self._buffer))


class TargetLengthScorer:
    """1 - |length - target| / target, at least 0. The task's column `target_length` overrides the run file's key."""

    def __init__(self, config: LengthReward) -> None:
        self._target = config.target

    async def score(self, task: Task, completion: Completion) -> Score:
        target = task.metadata.get("target_length", self._target)
        if target is None:
            return Score(None)
        if isinstance(target, bool) or not isinstance(target, int) or target < 1:
            raise ValueError(f"the task's column `target_length` is {target!r:.80}; expected a number of at least 1")
        return Score(max(0.0, 1 - abs(completion_length(completion) - target) / target))
