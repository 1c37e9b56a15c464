"""Which stretches of an experience were produced by which weights: partial rollouts are stitched from several."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollmill.types import Experience


@dataclass(frozen=True, slots=True)
class VersionSegment:
    """Tokens `start` to `end` (exclusive) of an experience, all produced by the weights of `version`."""

    start: int
    end: int
    version: int


def version_segments(experience: Experience) -> list[VersionSegment]:
    """The stretches of policy tokens of one version, in order; tokens of others (prompt, tools) belong to none.

    With log-probs per token, they have one valid behaviour policy together (AReaL, arXiv:2505.24298, Prop. 1).
    """
    versions = np.where(experience.action_mask, experience.versions, -1)
    if not len(versions):
        return []
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [VersionSegment(start, end, int(versions[start])) for start, end in pairwise(edges) if versions[start] >= 0]
