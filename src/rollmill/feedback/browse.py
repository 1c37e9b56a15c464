"""Which groups a person looks at next: filters, order, and the neighbours of a group."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollmill.feedback.refused import FeedbackError
from rollmill.feedback.rollout_index import RolloutIndex, StoredGroup
from rollmill.feedback.service import FeedbackService

SORT_ORDERS = {
    "stored": "as they were learned from",
    "unrated": "without feedback first",
    "disagreement": "greatest difference of rewards first",
}
_ENOUGH_GROUPS, _MOST_STEPS = 50, 100


@dataclass(frozen=True)
class GroupFilters:
    """What is asked for; None is anything. A group passes if one of its rewards lies within the bounds."""

    step: int | None = None
    task: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    order: str = "stored"
    before: int | None = None  #: only earlier steps

    @classmethod
    def of(cls, query: Mapping[str, str]) -> GroupFilters:
        """Raises FeedbackError for a value that makes no sense."""
        given: dict[str, Any] = {name: query[name].strip() for name in cls.__dataclass_fields__ if query.get(name)}
        for name, convert in (("step", int), ("before", int), ("at_least", float), ("at_most", float)):
            if name in given:
                try:
                    given[name] = convert(given[name])
                except ValueError as error:
                    raise FeedbackError(f"{name} is a number, not {given[name][:50]!r}") from error
        if given.get("order", "stored") not in SORT_ORDERS:
            raise FeedbackError(f"order is {', '.join(SORT_ORDERS)}, not {given['order'][:50]!r}")
        return cls(**given)

    def query(self) -> dict[str, Any]:
        """What `of` makes these filters from."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def passes(self, group: StoredGroup) -> bool:
        """Whether a group is asked for."""
        if self.task is not None and self.task != group.task:
            return False
        if self.at_least is None and self.at_most is None:
            return True
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return any(low <= reward <= high for reward in group.rewards)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in the list."""

    group: StoredGroup
    mean: float | None  #: reward
    said: int  #: how many acts count


@dataclass(frozen=True, slots=True)
class GroupPage:
    """A page of the list. `older` is what to give as `before` for the next one; None where nothing is left."""

    rows: list[GroupRow]
    steps: list[int]  #: those looked at
    older: int | None


def list_groups(desk: FeedbackService, filters: GroupFilters) -> GroupPage:
    """Groups of the newest steps, whole steps at a time, until there are about 50 or 100 steps were looked at."""
    said: dict[tuple[int | None, str], int] = {}
    for act in desk.acts.all():
        if act.undone_by is None:
            said[act.step, act.group] = said.get((act.step, act.group), 0) + 1
    wanted = [
        step
        for step in reversed(desk.stored.steps())
        if filters.step in (None, step) and (filters.before is None or step < filters.before)
    ]
    rows: list[GroupRow] = []
    looked: list[int] = []
    for step in wanted[:_MOST_STEPS]:
        looked.append(step)
        for group in desk.stored.groups(step):
            if filters.passes(group):
                mean = statistics.fmean(group.rewards) if group.rewards else None
                rows.append(GroupRow(group, mean, said.get((step, group.name), 0)))
        if len(rows) >= _ENOUGH_GROUPS:
            break
    if filters.order == "unrated":
        rows.sort(key=lambda row: row.said > 0)
    elif filters.order == "disagreement":
        rows.sort(key=lambda row: -row.group.spread)
    return GroupPage(rows, looked, looked[-1] if len(looked) < len(wanted) else None)


def find_neighbours(stored: RolloutIndex, step: int, name: str) -> tuple[StoredGroup | None, StoredGroup | None]:
    """The groups before and after one, across steps. Raises FeedbackError where there is none of this name."""
    here = stored.groups(step)
    place = next((index for index, group in enumerate(here) if group.name == name), None)
    if place is None:
        raise FeedbackError(f"step {step} has no group {name!r}", status=404)
    steps = stored.steps()
    earlier = [other for other in steps if other < step]
    later = [other for other in steps if other > step]
    before = here[place - 1] if place else _end(stored, earlier[-1:], -1)
    after = here[place + 1] if place + 1 < len(here) else _end(stored, later[:1], 0)
    return before, after


def _end(stored: RolloutIndex, steps: list[int], index: int) -> StoredGroup | None:
    groups = stored.groups(steps[0]) if steps else []
    return groups[index] if groups else None
