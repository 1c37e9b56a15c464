"""Input and report of an operator: experiences of whole groups, and helpers to read them."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.rewards.base import GATED, LATE, TIMEOUT
from rollmill.types import Completion, Experience, ExperienceSource, StopReason, Task, split_by_role


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """State of the run that operators may use."""

    step: int  #: the training step that rollouts are collected for, from 1
    version: int  #: version of the weights
    tokenizer: Any
    end_id: int  #: last token of demonstrations
    max_new_tokens: int
    deadline_s: float  #: timeout of an operator for one batch
    task: Callable[[str], Task]  #: finds a task by id; raises KeyError
    observe: Callable[
        [str, Sequence[float]], None
    ]  #: reports successes (0 to 1) of a task's completions to the sampler


@dataclass(slots=True)
class OperatorReport:
    """Result of one operator, in experiences; `reasons` counts dropped ones, `changes` changed ones and notes."""

    seen: int = 0
    changed: int = 0
    dropped: int = 0
    added: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)

    @property
    def kept(self) -> int:
        """Number of original experiences that remain."""
        return self.seen - self.dropped

    def numbers(self) -> dict[str, int]:
        """Metrics: kept, changed, dropped, added, and every reason."""
        counts = {"kept": self.kept, "changed": self.changed, "dropped": self.dropped, "added": self.added}
        return counts | {why.replace(" ", "_"): count for why, count in (*self.reasons.items(), *self.changes.items())}

    def add(self, other: OperatorReport) -> None:
        """Add the counts of another report."""
        self.seen += other.seen
        self.changed += other.changed
        self.dropped += other.dropped
        self.added += other.added
        self.reasons += other.reasons
        self.changes += other.changes


class Batch:
    """Experiences in a pipeline. An operator changes them in place and records each change.

    Reasons are short constant texts such as `too long`, because they become names of metrics. `operator` is the
    operator's name in its pipeline.
    """

    def __init__(self, experiences: Sequence[Experience], context: PipelineContext, operator: str = "") -> None:
        self.context, self.operator = context, operator
        self.report = OperatorReport(seen=len(experiences))
        self._experiences = {experience.id: experience for experience in experiences}
        assert len(self._experiences) == len(experiences), "ids of experiences are unique"
        self._changed: set[str] = set()
        self._added: set[str] = set()

    @property
    def experiences(self) -> list[Experience]:
        """Remaining experiences, added ones last, as a copy: they may be dropped while looping over it."""
        return list(self._experiences.values())

    def groups(self, source: ExperienceSource = ExperienceSource.ROLLOUT) -> dict[str, list[Experience]]:
        """The experiences of one source by group, in order."""
        found: dict[str, list[Experience]] = {}
        for experience in self._experiences.values():
            if experience.source is source:
                found.setdefault(experience.group, []).append(experience)
        return found

    def compared(self, source: ExperienceSource = ExperienceSource.ROLLOUT) -> list[list[Experience]]:
        """The experiences of one source that are compared with each other: those of a group, of one role."""
        return [own for group in self.groups(source).values() for own in split_by_role(group)]

    def drop(self, experience: Experience, why: str) -> None:
        """Drop an experience; the others of its group stay. Raises ValueError if it is not in the batch."""
        if self._experiences.get(experience.id) is not experience:
            raise ValueError(f"experience {experience.id} cannot be dropped: it is not in the batch")
        del self._experiences[experience.id]
        if experience.id in self._added:
            self.report.added -= 1
            return
        self.report.dropped += 1
        self.report.reasons[why] += 1

    def change(self, experience: Experience, why: str) -> None:
        """Record that an experience was changed; `changed` counts it once per operator."""
        self.report.changes[why] += 1
        if experience.id not in self._changed:
            self._changed.add(experience.id)
            self.report.changed += 1

    def note(self, why: str) -> None:
        """Count an event that changes no experience."""
        self.report.changes[why] += 1

    def add(self, experience: Experience, why: str) -> None:
        """Add a new experience: a demonstration, one of a pair (a group of two), or a rollout.

        Raises ValueError if its id is known (a store would take it for the same experience), or if its arrays differ
        in length.
        """
        arrays = (experience.token_ids, experience.action_mask, experience.logprobs, experience.versions)
        if len({len(array) for array in arrays}) > 1:
            lengths = "token_ids {}, action_mask {}, logprobs {}, versions {}".format(*map(len, arrays))
            raise ValueError(f"experience {experience.id} has arrays of different lengths ({lengths})")
        if experience.id in self._experiences:
            raise ValueError(f"experience {experience.id} is added twice; ids have to be new")
        self._experiences[experience.id] = experience
        self._added.add(experience.id)
        self.report.added += 1
        self.report.changes[why] += 1


# Helpers to read experiences


def copy_experience(experience: Experience) -> Experience:
    """Copy an experience for operators to change: a checkpoint or a store may hold the original."""
    arrays = {name: getattr(experience, name).copy() for name in ("token_ids", "action_mask", "logprobs", "versions")}
    parts, info = dict(experience.reward_parts), copy.deepcopy(experience.info)
    return replace(experience, **arrays, reward_parts=parts, info=info)


def rollouts_of(batch: Batch) -> list[Experience]:
    """The rollouts of a batch."""
    return [experience for group in batch.groups().values() for experience in group]


def reward_value(experience: Experience, part: str | None) -> float | None:
    """The reward, or a part of it; None if it is missing or not finite."""
    value = experience.reward if part is None else experience.reward_parts.get(part)
    return value if value is not None and math.isfinite(value) else None


def is_success(experience: Experience, part: str | None, threshold: float) -> bool | None:
    """True if the reward (or a part) is at least `threshold`; None if it was not scored.

    A part that is missing because of a gate or a timeout is a failure.
    """
    value = reward_value(experience, part)
    if value is not None:
        return value >= threshold
    if part is None or part in experience.reward_parts:
        return None
    outcome = experience.info.get("outcomes", {}).get(part.partition("/")[0])
    return False if outcome in (GATED, TIMEOUT, LATE) else None


def is_finished(experience: Experience) -> bool:
    """True if the completion ended with an end-of-sequence token or a stop string."""
    return experience.stop_reason in (StopReason.EOS, StopReason.STOP)


def response_length(experience: Experience) -> int:
    """Number of policy tokens; of tokens after the prompt if all are masked."""
    return experience.action_tokens or len(response_ids(experience))


def response_ids(experience: Experience) -> npt.NDArray[np.int64]:
    """All tokens after the prompt, including those of tools."""
    return experience.token_ids[prompt_length(experience) :].astype(np.int64)


def prompt_length(experience: Experience) -> int:
    """Number of tokens before the first turn of the policy."""
    starts = [turn.start for turn in experience.turns if turn.role == "assistant"]
    if starts:
        return starts[0]
    actions = np.flatnonzero(experience.action_mask)
    return int(actions[0]) if len(actions) else len(experience.token_ids)


def to_completion(experience: Experience, index: int = 0) -> Completion:
    """Convert an experience for rewards. All turns after the prompt count as the completion's tokens.

    A masked one keeps the version of its oldest token, which rewards with `after_steps` use.
    """
    start = prompt_length(experience)
    rest = slice(start, None)
    versions = experience.versions[rest]
    if not experience.action_tokens:
        versions = np.full_like(versions, experience.info.get("masked", 0))
    return Completion(
        prompt_ids=experience.token_ids[:start],
        token_ids=experience.token_ids[rest],
        logprobs=experience.logprobs[rest],
        versions=versions,
        kept_logmass=np.zeros(len(experience.token_ids) - start, np.float32),
        text=experience.response,
        stop_reason=experience.stop_reason,
        seed=0,
        index=index,
        reply=experience.parsed_reply,
    )
