"""From what a pipeline left to groups on their shelves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.buffer.base import PIPELINE, ExperienceKind, Group
from rollmill.types import Experience, ExperienceSource


def split_by_kind(experiences: Sequence[Experience], group: str, tokenizer: str) -> list[Group]:
    """What a pipeline left of one group, and made from it, as groups on their shelves.

    Args:
        tokenizer: fingerprint of the one that made the tokens; what is made may be learned from by other runs.
    """
    usual = [e for e in experiences if e.source is ExperienceSource.ROLLOUT]
    made: dict[str, list[Experience]] = {}
    for experience in experiences:
        if experience.source is not ExperienceSource.ROLLOUT:
            paired = experience.source is ExperienceSource.PREFERENCE
            made.setdefault(experience.group if paired else experience.id, []).append(experience)
    found = [Group(group, usual, priority=_mean_priority(usual))] if usual else []
    shelves = {ExperienceSource.EXPERT: ExperienceKind.EXPERT, ExperienceSource.PREFERENCE: ExperienceKind.PREFERENCE}
    info = {"tokenizer": tokenizer}
    made_groups = [
        Group(name, own, shelves[own[0].source], writer=PIPELINE, info=dict(info)) for name, own in made.items()
    ]
    return found + made_groups


def _mean_priority(experiences: Sequence[Experience]) -> float:
    return float(np.mean([e.info.get("priority", 1.0) for e in experiences]))
