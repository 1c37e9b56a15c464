"""Synthetic rollouts for the training benchmarks, the same on every side."""

from __future__ import annotations

import json
import random

Groups = list[tuple[int, list[int]]]  #: by group: number of tokens of its prompt, and of each of its completions
Rollouts = list[tuple[list[int], list[list[int]]]]  #: by group: token ids of the prompt, and of each completion


def parse_groups(text: str) -> Groups:
    """Parse groups in JSON from a command line."""
    return [(prompt, list(completions)) for prompt, completions in json.loads(text)]


def rollouts(vocab: int, groups: Groups) -> Rollouts:
    """Draw random ids from 1 to `vocab` - 1 with the lengths of `groups`."""
    source = random.Random(0)

    def draw(length: int) -> list[int]:
        return [source.randrange(1, vocab) for _ in range(length)]

    return [(draw(prompt), [draw(length) for length in completions]) for prompt, completions in groups]


def mean_id(ids: list[int]) -> float:
    """Reward: the mean token id, which differs between completions, so that every one has an advantage."""
    return sum(ids) / len(ids)
