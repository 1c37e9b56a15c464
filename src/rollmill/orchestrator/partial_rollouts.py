"""Partial rollouts: groups with unfinished completions, stored between two steps in the run's buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollmill.buffer import ExperienceKind, ExperienceStore, Group
from rollmill.buffer.base import version_segments
from rollmill.types import Experience, StopReason

SEGMENTS = "segments"
"""Key of `info`: number of weight versions that generated the completion."""
_ALL = 10**6


class PartialRollouts:
    """Stores unfinished groups at the end of a step and takes them back at the start of the next.

    Args:
        stage: only groups of this stage are taken; an earlier stage's are not continued.
    """

    def __init__(self, store: ExperienceStore, stage: str) -> None:
        self._store, self._stage = store, stage

    def put(self, groups: dict[int, list[Experience]], version: int) -> None:
        """Store groups, by number, while weights are at `version`."""
        self._store.put(
            [
                Group(
                    f"{experiences[0].group}@{version}",
                    experiences,
                    ExperienceKind.PARTIAL,
                    info={"stage": self._stage, "number": number},
                )
                for number, experiences in groups.items()
            ]
        )

    def take(self, *, step: int) -> dict[int, list[Experience]]:
        """Take the groups stored before `step`, by number; the same step gets the same groups again."""
        taken = self._store.take_partial(_ALL, step=step)
        return {
            int(group.info["number"]): group.experiences for group in taken if group.info.get("stage") == self._stage
        }


def count_unfinished(experiences: Sequence[Experience]) -> int:
    """Number of interrupted completions."""
    return sum(each.stop_reason is StopReason.ABORTED for each in experiences)


def response_tokens(experiences: Sequence[Experience]) -> int:
    """Tokens of completions, whether or not they count in the loss."""
    return sum(each.turns[-1].end - each.turns[-1].start for each in experiences)


def trainable_part(experience: Experience, *, newest: bool) -> Experience:
    """Prepare a finished completion for training, with the number of its segments in `info`.

    With `newest` only its last segment counts in the loss (Kimi k1.5, arXiv:2501.12599, section 2.6.2); earlier tokens
    are context.
    """
    parts = version_segments(experience)
    experience = replace(experience, info={**experience.info, SEGMENTS: len(parts)})
    if not newest or len(parts) < 2:
        return experience
    mask = experience.action_mask & (experience.versions == parts[-1].version)
    return replace(
        experience,
        action_mask=mask,
        logprobs=np.where(mask, experience.logprobs, 0).astype(np.float32),
        versions=np.where(mask, experience.versions, -1).astype(np.int32),
    )
