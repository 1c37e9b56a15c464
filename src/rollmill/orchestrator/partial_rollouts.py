"""Groups with unfinished completions, between two steps: on the shelf `partial` of the run's buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollmill.buffer import ExperienceKind, ExperienceStore, Group
from rollmill.buffer.base import version_segments
from rollmill.types import Experience, StopReason

SEGMENTS = "segments"
"""Key of `info`: how many versions of the weights have written a completion."""
_ALL = 10**6


class PartialRollouts:
    """Puts groups away at the end of a step and takes them at the beginning of the next.

    Args:
        stage: only groups of this stage are taken; what an earlier one left is not continued.
    """

    def __init__(self, store: ExperienceStore, stage: str) -> None:
        self._store, self._stage = store, stage

    def put(self, groups: dict[int, list[Experience]], version: int) -> None:
        """Put groups away, by number, while weights are at `version`."""
        self._store.put(
            [
                Group(
                    f"{own[0].group}@{version}",
                    own,
                    ExperienceKind.PARTIAL,
                    info={"stage": self._stage, "number": number},
                )
                for number, own in groups.items()
            ]
        )

    def take(self, *, step: int) -> dict[int, list[Experience]]:
        """What was put away before `step`, by number; the same step gets the same again."""
        taken = self._store.take_partial(_ALL, step=step)
        return {
            int(group.info["number"]): group.experiences for group in taken if group.info.get("stage") == self._stage
        }


def count_unfinished(experiences: Sequence[Experience]) -> int:
    """How many completions were interrupted."""
    return sum(each.stop_reason is StopReason.ABORTED for each in experiences)


def response_tokens(experiences: Sequence[Experience]) -> int:
    """Tokens of completions, whether they count in the loss or not."""
    return sum(each.turns[-1].end - each.turns[-1].start for each in experiences)


def trainable_part(experience: Experience, *, newest: bool) -> Experience:
    """A whole completion as it is learned from, with the number of its segments in `info`.

    With `newest` only the segment that ended it counts in the loss (Kimi k1.5, arXiv:2501.12599, section 2.6.2); the
    tokens before are what it was given.
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
