"""What a pipeline left of a group, on its shelves."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmill.buffer import Shelf
from rollmill.buffer.grouping import grouped
from rollmill.core.types import Experience, Source


def made(id: str, group: str, source: Source = Source.USUAL, **info: Any) -> Experience:
    tokens = np.arange(3, dtype=np.int32)
    return Experience(id, "t", group, tokens, tokens > 0, np.zeros(3, np.float32), tokens, source=source, info=info)


def test_completions_stay_together_and_what_was_made_has_places_of_its_own() -> None:
    left = [
        made("g/0", "g", priority=0.5),
        made("g/e", "g", Source.EXPERT),
        made("g/1", "g", priority=0.25),
        made("g/f", "g", Source.EXPERT),
        made("p/chosen", "p", Source.PREFERENCE),
        made("p/rejected", "p", Source.PREFERENCE),
    ]
    found = grouped(left, "g", "abc")
    assert [(group.id, group.shelf, [e.id for e in group.experiences], group.writer) for group in found] == [
        ("g", Shelf.USUAL, ["g/0", "g/1"], "explorer"),
        ("g/e", Shelf.EXPERT, ["g/e"], "pipeline"),
        ("g/f", Shelf.EXPERT, ["g/f"], "pipeline"),
        ("p", Shelf.PREFERENCE, ["p/chosen", "p/rejected"], "pipeline"),
    ]
    assert found[0].priority == 0.375
    assert [group.info for group in found[1:]] == [{"tokenizer": "abc"}] * 3


def test_nothing_left_is_no_group() -> None:
    assert grouped([], "g", "abc") == []
    assert [group.shelf for group in grouped([made("g/e", "g", Source.EXPERT)], "g", "abc")] == [Shelf.EXPERT]
