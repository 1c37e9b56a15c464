"""What is imitated or preferred: worked solutions of the taskset, and what people and pipelines put on the shelves."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollmill.buffer.base import ExperienceKind, ExperienceStore, Group
from rollmill.data import Sampler
from rollmill.errors import StoreError
from rollmill.types import Experience, ExperienceSource, Task

# A store whose shelves are looked at again and again while others write to it.

StoreOpener = Callable[[], ExperienceStore | None]
"""Opens a store that may not be there yet: feedback can begin while a run goes on."""


@dataclass(slots=True)
class StoreReader:
    """The shelves of one store. Closing it is the opener's affair."""

    name: str  #: for messages
    open: StoreOpener
    store: ExperienceStore | None = None
    _after: dict[ExperienceKind, int] = field(default_factory=dict)

    def new(self, shelf: ExperienceKind) -> Iterator[Group]:
        """Groups that came since the last call, or came back: what is restored comes last."""
        self.store = self.store or self.open()
        if self.store is not None:
            for number, group in self.store.read(shelf, after=self._after.get(shelf, 0)):
                self._after[shelf] = number
                yield group

    def get(self, ids: list[str]) -> list[Group]:
        """Groups by id, without those that were removed since."""
        return [] if self.store is None or not ids else self.store.get(ids)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TasksetDemonstrations:
    """Worked solutions, or pairs, of a taskset."""

    sampler: Sampler
    render: Callable[[Task, int], list[Experience]]  #: a task as its place in a batch; one experience, or a pair


class DemonstrationPool:
    """Hands out demonstrations (or pairs) forever: every one once per epoch, those on shelves before the taskset's.

    Args:
        pairs: hand out preference pairs rather than demonstrations.
        labels: hand out labelled completions: rated ones, and both of each preference pair.
        rated_at_least: completions with this rating count as demonstrations; None: none do. With `labels` those with
            this rating are desirable, the others undesirable.
        tokenizer: fingerprint of the policy's tokenizer; groups that were made with another are refused.
        context: longest sequence of the policy in tokens; longer ones are left out, with a warning.
        seed: what the order within an epoch derives from.

    Raises:
        StoreError: a group was made with another tokenizer.
    """

    def __init__(
        self,
        tasks: TasksetDemonstrations | None,
        shelves: Sequence[StoreReader],
        *,
        pairs: bool,
        labels: bool = False,
        rated_at_least: float | None,
        tokenizer: str,
        context: int,
        seed: int,
    ) -> None:
        self._tasks, self._shelves, self._pairs, self._labels = tasks, shelves, pairs, labels
        self._rated_at_least, self._tokenizer, self._seed = rated_at_least, tokenizer, seed
        self._context = context
        self._epoch, self._drawn = 0, 0
        self._served: set[str] = set()
        self._known: list[list[str]] = [[] for _ in shelves]  # ids of groups by store, in the order they came

    def draw(self, count: int, *, step: int = 0) -> list[Experience]:
        """The next `count` demonstrations, labelled completions, or pairs (two experiences each); none where there is
        nothing at all. With `labels` a pair from a shelf counts as one, and gives two experiences.

        `step` is the training step (of the stage, from 0) that asks.
        """
        found: list[Experience] = []
        taken, idle = 0, 0
        while taken < count and idle < 2:  # twice nothing: neither left in this epoch, nor in a new one
            own = self._from_shelves(count - taken)
            taken, idle = taken + len(own), 0 if own else idle + 1
            found += [each for group in own for each in self._presented(group)]
            if taken < count and self._tasks is not None:
                found += self._from_tasks(taken, count, step)
                taken = count
            elif not own:
                self._turn()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the pool is, as plain JSON."""
        tasks = None if self._tasks is None else self._tasks.sampler.state_dict()
        return {"epoch": self._epoch, "drawn": self._drawn, "served": sorted(self._served), "tasks": tasks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._epoch, self._drawn, self._served = state["epoch"], state["drawn"], set(state["served"])
        if self._tasks is not None and state["tasks"] is not None:
            self._tasks.sampler.load_state_dict(state["tasks"])

    def _from_tasks(self, first: int, count: int, step: int) -> list[Experience]:
        assert self._tasks is not None
        sampler, found = self._tasks.sampler, list[Experience]()
        for place in range(first, count):
            before, task = sampler.epoch, sampler.next(step)
            if sampler.epoch != before:
                self._turn()
            found += self._tasks.render(task, place)
        return found

    def _turn(self) -> None:
        """A new epoch: everything on the shelves may be served again."""
        self._epoch += 1
        self._served.clear()

    def _from_shelves(self, count: int) -> list[Group]:
        """Up to `count` groups that this epoch has not served yet."""
        found: list[Group] = []
        for number, shelves in enumerate(self._shelves):
            self._look(shelves, self._known[number])
            keys = {f"{number}:{name}": name for name in self._known[number]}
            waiting = sorted(keys.keys() - self._served, key=self._place)
            while waiting and len(found) < count:
                now, waiting = waiting[: count - len(found)], waiting[count - len(found) :]
                found += shelves.get([keys[key] for key in now])
                self._served.update(now)
        return found

    def _place(self, key: str) -> str:
        return hashlib.sha1(f"{self._seed}:{self._epoch}:{key}".encode()).hexdigest()

    def _look(self, shelves: StoreReader, known: list[str]) -> None:
        """Take note of what has come."""
        found = list(shelves.new(ExperienceKind.PREFERENCE if self._pairs or self._labels else ExperienceKind.EXPERT))
        if self._rated_at_least is not None and not self._pairs:
            rated = [group for group in shelves.new(ExperienceKind.RATED) if group.experiences[0].reward is not None]
            found += [group for group in rated if self._labels or self._liked(group)]
        known += [group.id for group in found if self._fits(group, shelves.name)]

    def _liked(self, group: Group) -> bool:
        reward = group.experiences[0].reward
        return reward is not None and self._rated_at_least is not None and reward >= self._rated_at_least

    def _fits(self, group: Group, where: str) -> bool:
        own = group.info.get("tokenizer", self._tokenizer)
        if own != self._tokenizer:
            raise StoreError(
                f"{where}: group {group.id} was made with another tokenizer ({own}) than the policy's "
                f"({self._tokenizer}), so its tokens mean other text; train the model it was made for, or leave the "
                "source out of experts.sources"
            )
        longest = max(len(each.token_ids) for each in group.experiences)
        if longest > self._context:
            text = "%s: group %s is left out: it has %d tokens, and the model's context holds %d"
            log.warning(text, where, group.id, longest, self._context)
        return longest <= self._context

    def _presented(self, group: Group) -> list[Experience]:
        """A group as the trainer takes it: labelled completions and pairs under a name of their own, everything else as
        demonstrations."""
        self._drawn += 1
        if self._labels:
            desirable = [e.reward == 1 for e in group.experiences]
            if group.shelf is ExperienceKind.RATED:
                desirable = [self._liked(group)]
            return [
                as_labelled(e, liked, f"{group.id}/{self._drawn}/{place}")
                for place, (e, liked) in enumerate(zip(group.experiences, desirable, strict=True))
            ]
        if self._pairs:
            return [replace(e, group=f"{group.id}/{self._drawn}") for e in group.experiences]
        return [as_demonstration(e) for e in group.experiences]


def as_demonstration(experience: Experience) -> Experience:
    """A completion as something to imitate: the same tokens, log-probs 0, versions -1, no reward."""
    if experience.source is ExperienceSource.EXPERT:
        return experience
    return _copied(experience, ExperienceSource.EXPERT, None)


def as_labelled(experience: Experience, desirable: bool, group: str) -> Experience:
    """A completion as a desirable or undesirable one, in a group of its own: log-probs 0, versions -1."""
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


# What people and applications say a completion is worth, in place of the reward it earned.


class RatingOverrides:
    """The ratings of stored completions, as far as they were not undone. The last one of a completion counts."""

    def __init__(self, shelves: Sequence[StoreReader]) -> None:
        self._shelves = shelves
        self._acts: list[dict[str, list[str]]] = [{} for _ in shelves]  # completion -> groups that rate it

    def apply_ratings(self, experiences: Sequence[Experience]) -> list[Experience]:
        """The experiences, with ratings as rewards where there are any; `info` keeps the reward that was earned."""
        for shelves, acts in zip(self._shelves, self._acts, strict=True):
            for group in shelves.new(ExperienceKind.RATED):
                for completion in group.info.get("of", []):
                    acts.setdefault(completion, []).append(group.id)
        return [self._rated(experience) for experience in experiences]

    def _rated(self, experience: Experience) -> Experience:
        found = [
            group
            for shelves, acts in zip(self._shelves, self._acts, strict=True)
            for group in shelves.get(acts.get(experience.id, []))
        ]
        if not found:
            return experience
        last = max(found, key=lambda group: group.created_at)
        info = {**experience.info, "rated_by": last.author, "earned": experience.reward}
        return replace(experience, reward=last.experiences[0].reward, info=info)
