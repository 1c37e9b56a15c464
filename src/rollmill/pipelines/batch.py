"""What an operator sees and reports to: experiences of whole groups, and what became of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.types import Experience, ExperienceSource, Task


@dataclass(frozen=True, slots=True)
class PipelineContext:
    """What operators may know about the run."""

    step: int  #: the training step that is being collected, from 1
    version: int  #: of the weights
    tokenizer: Any
    end_id: int  #: what demonstrations end with
    max_new_tokens: int
    deadline_s: float  #: how long an operator may take for one batch
    task: Callable[[str], Task]  #: by id; KeyError where the taskset has none
    observe: Callable[[str, Sequence[float]], None]  #: tells the sampler the success (0 to 1) of a task's completions


@dataclass(slots=True)
class OperatorReport:
    """What one operator did, in experiences; `reasons` counts dropped ones."""

    seen: int = 0
    changed: int = 0
    dropped: int = 0
    added: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)

    @property
    def kept(self) -> int:
        """Experiences that were there before and still are."""
        return self.seen - self.dropped

    def numbers(self) -> dict[str, int]:
        """As metrics: kept, changed, dropped, added, and every reason."""
        counts = {"kept": self.kept, "changed": self.changed, "dropped": self.dropped, "added": self.added}
        return counts | {why.replace(" ", "_"): count for why, count in (*self.reasons.items(), *self.changes.items())}

    def add(self, other: OperatorReport) -> None:
        """Sum up."""
        self.seen += other.seen
        self.changed += other.changed
        self.dropped += other.dropped
        self.added += other.added
        self.reasons += other.reasons
        self.changes += other.changes


class Batch:
    """Experiences on their way through a pipeline. An operator changes them in place and says so.

    Reasons are short constant words such as `too long`: they become names of metrics. `operator` is the name that the
    operator has in its pipeline.
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
        """Those that are still there, added ones last. A copy: dropping while looping is fine."""
        return list(self._experiences.values())

    def groups(self, source: ExperienceSource = ExperienceSource.ROLLOUT) -> dict[str, list[Experience]]:
        """The experiences of one source by group, in order."""
        found: dict[str, list[Experience]] = {}
        for experience in self._experiences.values():
            if experience.source is source:
                found.setdefault(experience.group, []).append(experience)
        return found

    def drop(self, experience: Experience, why: str) -> None:
        """Take an experience out; the others of its group stay. Raises ValueError for one that is not there."""
        if self._experiences.get(experience.id) is not experience:
            raise ValueError(f"experience {experience.id} is dropped, and it is not there")
        del self._experiences[experience.id]
        if experience.id in self._added:
            self.report.added -= 1
            return
        self.report.dropped += 1
        self.report.reasons[why] += 1

    def change(self, experience: Experience, why: str) -> None:
        """Note that an experience was changed; counted once per operator."""
        self.report.changes[why] += 1
        if experience.id not in self._changed:
            self._changed.add(experience.id)
            self.report.changed += 1

    def note(self, why: str) -> None:
        """Count something that is worth knowing and changes no experience."""
        self.report.changes[why] += 1

    def add(self, experience: Experience, why: str) -> None:
        """Put a new experience in: an expert one, one of a pair (a group of two), or a usual one.

        Raises ValueError where its id is known (a store would take it for the same experience), or where its arrays
        are not of one length.
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
