"""What people and applications say a completion is worth, in place of the reward it earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollmill.buffer.base import ExperienceKind
from rollmill.buffer.reader import StoreReader
from rollmill.types import Experience


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
