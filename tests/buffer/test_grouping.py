"""What a pipeline left of a group, by kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmill.buffer import ExperienceKind
from rollmill.buffer.base import split_by_kind
from rollmill.types import Experience, ExperienceSource


def made(id: str, group: str, source: ExperienceSource = ExperienceSource.ROLLOUT, **info: Any) -> Experience:
    tokens = np.arange(3, dtype=np.int32)
    return Experience(id, "t", group, tokens, tokens > 0, np.zeros(3, np.float32), tokens, source=source, info=info)


def test_completions_stay_together_and_what_was_made_has_places_of_its_own() -> None:
    left = [
        made("g/0", "g", priority=0.5),
        made("g/e", "g", ExperienceSource.EXPERT),
        made("g/1", "g", priority=0.25),
        made("g/f", "g", ExperienceSource.EXPERT),
        made("p/chosen", "p", ExperienceSource.PREFERENCE),
        made("p/rejected", "p", ExperienceSource.PREFERENCE),
    ]
    found = split_by_kind(left, "g", "abc")
    assert [(group.id, group.kind, [e.id for e in group.experiences], group.writer) for group in found] == [
        ("g", ExperienceKind.ROLLOUT, ["g/0", "g/1"], "explorer"),
        ("g/e", ExperienceKind.EXPERT, ["g/e"], "pipeline"),
        ("g/f", ExperienceKind.EXPERT, ["g/f"], "pipeline"),
        ("p", ExperienceKind.PREFERENCE, ["p/chosen", "p/rejected"], "pipeline"),
    ]
    assert found[0].priority == 0.375
    assert [group.info for group in found[1:]] == [{"tokenizer": "abc"}] * 3


def test_nothing_left_is_no_group() -> None:
    assert split_by_kind([], "g", "abc") == []
    assert [group.kind for group in split_by_kind([made("g/e", "g", ExperienceSource.EXPERT)], "g", "abc")] == [
        ExperienceKind.EXPERT
    ]
