"""Completions that are generated in parts: put away when the engine is interrupted, and continued later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollmill.engines.base import CompletionPrefix
from rollmill.types import Completion, Experience


@dataclass(slots=True)
class PartialRollout:
    """Completions of a group and the experiences made of them, in the same order."""

    completions: list[Completion]
    experiences: list[Experience]


def completion_prefix(experience: Experience) -> CompletionPrefix:
    """What a completion goes on from: the tokens of an experience with one turn of the policy, with their log-probs."""
    mine = experience.action_mask
    logprobs = experience.logprobs[mine]  # truncation is in them already, so that its part is 0
    return CompletionPrefix(
        experience.token_ids[mine],
        logprobs,
        np.zeros_like(logprobs),
        experience.versions[mine],
        routing=experience.routing,
    )


def add_earlier_timings(experiences: Sequence[Experience], earlier: Sequence[Experience]) -> list[Experience]:
    """The experiences, with the seconds that earlier parts took added; both in the same order."""
    added = []
    for one, before in zip(experiences, earlier, strict=True):
        names = dict.fromkeys([*one.timings, *before.timings])
        timings = {name: one.timings.get(name, 0.0) + before.timings.get(name, 0.0) for name in names}
        added.append(replace(one, timings=timings))
    return added
