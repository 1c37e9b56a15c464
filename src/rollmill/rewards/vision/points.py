"""The points reward: each point has to hit a place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.config.rewards import PointsReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import Verdict
from rollmill.rewards.text.reading import LONGEST_TEXT, aside, judged_part
from rollmill.rewards.vision.boxes import most_places
from rollmill.rewards.vision.coordinates import Point, box, factors, numbers, point
from rollmill.rewards.vision.geometry import in_polygon
from rollmill.rewards.vision.matching import f1, matched_sum, same_labels
from rollmill.rewards.vision.reading import read_points

_FORMS = (
    "[x, y], [x1, y1, x2, y2], or an object with `point`, `box` or `polygon` and perhaps `label`; or a list of such"
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a point may hit: the corners of a polygon, two of a box, or one point."""

    kind: str
    corners: tuple[Point, ...]
    label: str | None

    def hits(self, points: Sequence[Point], tolerance: float) -> npt.NDArray[np.bool_]:
        """Which points [P] hit; edges of a box belong to it."""
        if self.kind == "polygon":
            return in_polygon(self.corners, points)
        where = np.asarray(points, np.float64).reshape(-1, 2)
        if self.kind == "box":
            low, high = np.asarray(self.corners, np.float64)
            within: npt.NDArray[np.bool_] = ((where >= low) & (where <= high)).all(1)
            return within
        return np.asarray(np.hypot(*(where - self.corners[0]).T) <= tolerance)


class Points:
    """2 * hits / (places of the reference + points named), from 0 to 1; a place is hit once.

    Outcomes besides ok: `no_answer`, `too_many`, `too_long`.
    """

    def __init__(self, config: PointsReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Verdict(None)
        targets = targets_of(task.answer)
        if config.tolerance == 0 and any(target.kind == "point" for target in targets):
            raise ValueError("the task's answer is a point, which nothing hits with tolerance 0; give `tolerance`")
        across, down = factors(config.coordinates, config.reference or config.coordinates, task.metadata)
        text = judged_part(completion.text, config)
        if text is not None and len(text) > LONGEST_TEXT:
            return Verdict(0.0, "too_long")
        found = None if text is None else await aside(len(text), read_points, text)
        if found is None:
            return Verdict(0.0, "no_answer")
        if len(found.places) > most_places(len(targets)):
            return Verdict(0.0, "too_many")
        kept = [
            ((place[0] * across, place[1] * down), label)
            for place, label in zip(found.places, found.labels, strict=True)
            if place is not None
        ]
        corners = sum(len(target.corners) for target in targets)
        hits = await aside(2 * corners * len(kept), _matched, config, targets, kept) if kept and targets else 0.0
        return Verdict(f1(hits, len(targets), len(found.places)))


def _matched(config: PointsReward, targets: Sequence[Target], named: Sequence[tuple[Point, str | None]]) -> float:
    places = [place for place, _ in named]
    hits = np.array([target.hits(places, config.tolerance) for target in targets])
    if config.labels:
        hits &= same_labels([target.label for target in targets], [label for _, label in named])
    return matched_sum(hits.astype(np.float64))


def targets_of(answer: Any) -> list[Target]:
    """What the task's answer says is to be hit. Raises ValueError where it says nothing of the kind."""
    alone = _target(answer)
    entries = [alone] if alone is not None else [_target(entry) for entry in _list(answer)]
    if None in entries or (not entries and answer != []):
        raise ValueError(f"the task's answer is {answer!r:.80}; expected {_FORMS}")
    return [entry for entry in entries if entry is not None]


def _list(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, list | tuple) else []


def _target(entry: Any) -> Target | None:
    if numbers(entry, 2) is not None or numbers(entry, 4) is not None:
        entry = {"point" if len(entry) == 2 else "box": entry}
    if not isinstance(entry, Mapping):
        return None
    label = entry.get("label")
    if not isinstance(label, str | None):
        return None
    if (place := point(entry.get("point"))) is not None:
        return Target("point", (place,), label)
    if (corners := box(entry.get("box"), "xyxy")) is not None:
        return Target("box", (corners[:2], corners[2:]), label)
    polygon = [point(corner) for corner in _list(entry.get("polygon"))]
    if len(polygon) < 3 or None in polygon:
        return None
    return Target("polygon", tuple(corner for corner in polygon if corner is not None), label)
