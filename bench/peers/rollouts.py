"""Made-up rollouts for the training benchmarks, the same on every side."""

from __future__ import annotations

import json
import random

Groups = list[tuple[int, list[int]]]  #: of each group: tokens of its prompt, and of each of its completions
Rollouts = list[tuple[list[int], list[list[int]]]]  #: of each group: the prompt's ids, and those of each completion


def parse_groups(text: str) -> Groups:
    """Groups from a command line, as `json.dumps` wrote them."""
    return [(prompt, list(completions)) for prompt, completions in json.loads(text)]


def rollouts(vocab: int, groups: Groups) -> Rollouts:
    """Random ids from 1 to `vocab` - 1 in the lengths of `groups`."""
    source = random.Random(0)

    def draw(length: int) -> list[int]:
        return [source.randrange(1, vocab) for _ in range(length)]

    return [(draw(prompt), [draw(length) for length in completions]) for prompt, completions in groups]


def mean_id(ids: list[int]) -> float:
    """The reward: the mean token id. It differs between completions, so that every one has an advantage."""
    return sum(ids) / len(ids)
