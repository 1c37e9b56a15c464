"""Reads demonstrations, preference pairs and ratings: from the taskset, from people and from pipelines."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollmill.buffer.base import PIPELINE, ExperienceKind, ExperienceStore, Group
from rollmill.data import Sampler
from rollmill.errors import StoreError
from rollmill.types import Experience, ExperienceSource, Task

StoreOpener = Callable[[], ExperienceStore | None]
"""Opens a store, or returns None if it does not exist yet: feedback may start during a run."""


@dataclass(slots=True)
class StoreReader:
    """Polls one store for new groups while others write to it. The opener has to close the store."""

    name: str  #: for messages
    open: StoreOpener
    store: ExperienceStore | None = None
    own: bool = False  #: of the run that reads
    _after: dict[ExperienceKind, int] = field(default_factory=dict)

    def new(self, kind: ExperienceKind) -> Iterator[Group]:
        """Groups that were added or restored since the last call."""
        self.store = self.store or self.open()
        if self.store is not None:
            for number, group in self.store.read(kind, after=self._after.get(kind, 0)):
                self._after[kind] = number
                yield group

    def get(self, ids: list[str]) -> list[Group]:
        """Groups by id, without removed ones."""
        return [] if self.store is None or not ids else self.store.get(ids)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TasksetDemonstrations:
    """Worked solutions, or pairs, of a taskset."""

    sampler: Sampler
    render: Callable[[Task, int], list[Experience]]  #: (task, index in the batch) -> one experience, or a pair
    tasks: Sequence[Task]  #: those that the sampler draws from


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """One demonstration, a pair, or what a stored pair is as labelled completions."""

    key: str  #: the same whenever it is drawn
    experiences: list[Experience]
    processed: bool = False  #: the run's own pipeline made it


class DemonstrationPool:
    """Yields demonstrations (or pairs) forever: each once per epoch, those of stores before those of the taskset.

    A training step that spans the end of an epoch repeats one only if there are fewer than it needs.

    Args:
        readers: stores with demonstrations, pairs or rated completions.
        pairs: yield preference pairs rather than demonstrations.
        labels: yield labelled completions: rated ones, and both of each preference pair.
        rated_at_least: completions with at least this rating count as demonstrations; None: none do. With `labels`
            these are desirable, the others undesirable.
        tokenizer: fingerprint of the policy's tokenizer; groups of another tokenizer are refused.
        context: longest sequence of the policy in tokens; longer ones are left out, with a warning.
        seed: seed of the order within an epoch.

    Raises:
        StoreError: a group was made with another tokenizer.
    """

    def __init__(
        self,
        tasks: TasksetDemonstrations | None,
        readers: Sequence[StoreReader],
        *,
        pairs: bool,
        labels: bool = False,
        rated_at_least: float | None,
        tokenizer: str,
        context: int,
        seed: int,
    ) -> None:
        self._tasks, self._readers, self._pairs, self._labels = tasks, readers, pairs, labels
        self._rated_at_least, self._tokenizer, self._seed = rated_at_least, tokenizer, seed
        self._context = context
        self._epoch, self._drawn = 0, 0
        self._served: set[str] = set()
        self._known: list[list[str]] = [[] for _ in readers]  # ids of groups by store, in the order of arrival
        self._postponed: list[Task] = []  # drawn in a step that had them already
        self._of_set: dict[str, set[str]] = {}  # keys of tasks by taskset
        for task in [] if tasks is None else tasks.tasks:
            self._of_set.setdefault(task.taskset, set()).add(_task_key(task))

    def draw(self, count: int, *, step: int = 0) -> list[Experience]:
        """The experiences of `draw_groups`."""
        return [each for group in self.draw_groups(count, set(), step=step) for each in group.experiences]

    def draw_groups(self, count: int, drawn: set[str], *, step: int = 0) -> list[DrawnGroup]:
        """The next `count` demonstrations, labelled completions, or pairs; none if there are none at all.

        With `labels`, a pair from a store counts as one and gives two experiences.

        Args:
            drawn: keys of what this training step has already; those of what is returned are added.
            step: training step of the stage, from 0.
        """
        found: list[DrawnGroup] = []
        idle = 0
        while len(found) < count and idle < 2:  # 2: none left in this epoch, and none in a new one
            groups = self._from_stores(count - len(found), drawn)
            idle = 0 if groups else idle + 1
            found += groups
            if len(found) < count and self._tasks is not None:
                found += self._from_tasks(len(found), count, step, drawn)
            elif not groups:
                self._next_epoch()
        return found

    def state_dict(self) -> dict[str, Any]:
        tasks = None if self._tasks is None else self._tasks.sampler.state_dict()
        postponed = {"postponed": [task.id for task in self._postponed]} if self._postponed else {}
        served = sorted(self._served)
        return {"epoch": self._epoch, "drawn": self._drawn, "served": served, "tasks": tasks, **postponed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._drawn, self._served = state["epoch"], state["drawn"], set(state["served"])
        if self._tasks is not None and state["tasks"] is not None:
            self._tasks.sampler.load_state_dict(state["tasks"])
            known = {task.id: task for task in self._tasks.tasks} if "postponed" in state else {}
            self._postponed = [known[name] for name in state.get("postponed", [])]

    def _from_tasks(self, first: int, count: int, step: int, drawn: set[str]) -> list[DrawnGroup]:
        assert self._tasks is not None
        found = []
        for place in range(first, count):
            task = self._next_task(step, drawn)
            drawn.add(_task_key(task))
            found.append(DrawnGroup(_task_key(task), self._tasks.render(task, place)))
        return found

    def _next_task(self, step: int, drawn: set[str]) -> Task:
        """The sampler's next task. One that this step has already waits for a later step, if its taskset has others."""
        assert self._tasks is not None
        sampler = self._tasks.sampler
        for waiting in self._postponed:
            if _task_key(waiting) not in drawn:
                self._postponed.remove(waiting)
                return waiting
        while True:
            before, task = sampler.epoch, sampler.next(step)
            if sampler.epoch != before:
                self._next_epoch()
            repeated = _task_key(task) in drawn
            if not repeated or task in self._postponed or self._of_set[task.taskset] <= drawn:
                return task
            self._postponed.append(task)

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._served.clear()

    def _from_stores(self, count: int, drawn: set[str]) -> list[DrawnGroup]:
        """Up to `count` groups that were not served in this epoch; those that this step has already only if there is
        nothing else."""
        found: list[DrawnGroup] = []
        for number, reader in enumerate(self._readers):
            self._read_new(reader, self._known[number])
            found += self._served_now(number, self._unserved(number) - drawn, count - len(found))
        if self._tasks is None:
            for number in range(len(self._readers)):
                found += self._served_now(number, self._unserved(number) & drawn, count - len(found))
        drawn.update(each.key for each in found)
        return found

    def _unserved(self, number: int) -> set[str]:
        return {f"{number}:{name}" for name in self._known[number]} - self._served

    def _served_now(self, number: int, keys: set[str], count: int) -> list[DrawnGroup]:
        """Up to `count` of these groups of a store, without removed ones."""
        reader, found = self._readers[number], list[DrawnGroup]()
        waiting = sorted(keys, key=self._sort_key)
        while waiting and len(found) < count:
            now, waiting = waiting[: count - len(found)], waiting[count - len(found) :]
            for group in reader.get([key.partition(":")[2] for key in now]):
                processed = reader.own and group.writer == PIPELINE
                found.append(DrawnGroup(f"{number}:{group.id}", self._presented(group), processed))
            self._served.update(now)
        return found

    def _sort_key(self, key: str) -> str:
        return hashlib.sha1(f"{self._seed}:{self._epoch}:{key}".encode()).hexdigest()

    def _read_new(self, reader: StoreReader, known: list[str]) -> None:
        """Add the ids of new groups to `known`."""
        found = list(reader.new(ExperienceKind.PREFERENCE if self._pairs or self._labels else ExperienceKind.EXPERT))
        if self._rated_at_least is not None and not self._pairs:
            rated = [group for group in reader.new(ExperienceKind.RATED) if group.experiences[0].reward is not None]
            found += [group for group in rated if self._labels or self._is_desirable(group)]
        known += [group.id for group in found if self._fits(group, reader.name)]

    def _is_desirable(self, group: Group) -> bool:
        reward = group.experiences[0].reward
        return reward is not None and self._rated_at_least is not None and reward >= self._rated_at_least

    def _fits(self, group: Group, where: str) -> bool:
        tokenizer = group.info.get("tokenizer", self._tokenizer)
        if tokenizer != self._tokenizer:
            raise StoreError(
                f"{where}: group {group.id} was made with another tokenizer ({tokenizer}) than the policy's "
                f"({self._tokenizer}), so its tokens mean other text; train the model it was made for, or leave the "
                "source out of offline_data.sources"
            )
        longest = max(len(each.token_ids) for each in group.experiences)
        if longest > self._context:
            text = "%s: group %s is left out: it has %d tokens, and the model's context holds %d"
            log.warning(text, where, group.id, longest, self._context)
        return longest <= self._context

    def _presented(self, group: Group) -> list[Experience]:
        """Convert a group for the trainer: labelled completions and pairs get a new group name, everything else becomes
        demonstrations."""
        self._drawn += 1
        if self._labels:
            desirable = [e.reward == 1 for e in group.experiences]
            if group.kind is ExperienceKind.RATED:
                desirable = [self._is_desirable(group)]
            return [
                as_labelled(e, good, f"{group.id}/{self._drawn}/{index}")
                for index, (e, good) in enumerate(zip(group.experiences, desirable, strict=True))
            ]
        if self._pairs:
            return [replace(e, group=f"{group.id}/{self._drawn}") for e in group.experiences]
        return [as_demonstration(e) for e in group.experiences]


def _task_key(task: Task) -> str:
    return f"task:{task.id}"


def as_demonstration(experience: Experience) -> Experience:
    """Convert a completion to a demonstration: the same tokens, log-probs 0, versions -1, no reward."""
    if experience.source is ExperienceSource.EXPERT:
        return experience
    return _copied(experience, ExperienceSource.EXPERT, None)


def as_labelled(experience: Experience, desirable: bool, group: str) -> Experience:
    """Convert a completion to a desirable or undesirable one that forms the group `group`: log-probs 0, versions -1."""
    return replace(_copied(experience, ExperienceSource.PREFERENCE, float(desirable)), group=group, temperature=1.0)


def _copied(experience: Experience, source: ExperienceSource, reward: float | None) -> Experience:
    length = len(experience.token_ids)
    return replace(
        experience,
        source=source,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        reward=reward,
        reward_parts={},
        advantage=None,
    )


class RatingOverrides:
    """Replaces rewards of stored completions by ratings of people and applications.

    The last rating of a completion that was not undone counts.
    """

    def __init__(self, readers: Sequence[StoreReader]) -> None:
        self._readers = readers
        self._ratings: list[dict[str, list[str]]] = [{} for _ in readers]  # completion -> groups that rate it

    def apply_ratings(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Replace rewards by ratings where there are any; `info` keeps the original reward."""
        for reader, ratings in zip(self._readers, self._ratings, strict=True):
            for group in reader.new(ExperienceKind.RATED):
                for completion in group.info.get("of", []):
                    ratings.setdefault(completion, []).append(group.id)
        return [self._rated(experience) for experience in experiences]

    def _rated(self, experience: Experience) -> Experience:
        found = [
            group
            for reader, ratings in zip(self._readers, self._ratings, strict=True)
            for group in reader.get(ratings.get(experience.id, []))
        ]
        if not found:
            return experience
        last = max(found, key=lambda group: group.created_at)
        info = {**experience.info, "rated_by": last.author, "earned": experience.reward}
        return replace(experience, reward=last.experiences[0].reward, info=info)
