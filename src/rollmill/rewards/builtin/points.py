"""The points reward: each point must hit a different target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollmill.rewards.base import Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread
from rollmill.rewards.vision.base import LocalizationReward
from rollmill.rewards.vision.geometry import (
    Point,
    boxes_in_pixels,
    finite_numbers,
    in_polygon,
    parse_box,
    parse_point,
    scale_factors,
)
from rollmill.rewards.vision.matching import f1_score, labels_match, max_detections, max_matching_score
from rollmill.types import Completion, Task

_FORMS = (
    "[x, y], [x1, y1, x2, y2], or an object with `point`, `box` or `polygon` and perhaps `label`; or a list of such"
)


@dataclass(frozen=True, slots=True)
class PointTarget:
    """The target of a point: the corners of a polygon, two of a box, or one point."""

    kind: str
    corners: tuple[Point, ...]
    label: str | None

    def hits(self, points: Sequence[Point], tolerance: float) -> npt.NDArray[np.bool_]:
        """Return which points [P] hit; the edges of a box belong to it."""
        if self.kind == "polygon":
            return in_polygon(self.corners, points)
        xy = np.asarray(points, np.float64).reshape(-1, 2)
        if self.kind == "box":
            low, high = np.asarray(self.corners, np.float64)
            within: npt.NDArray[np.bool_] = ((xy >= low) & (xy <= high)).all(1)
            return within
        return np.asarray(np.hypot(*(xy - self.corners[0]).T) <= tolerance)


class PointsReward(LocalizationReward):
    """F1 of points: each must hit a different location of the reference (a box, a polygon or a point)."""

    largest = 1.0
    name: Literal["points"]
    tolerance: float = Field(0.0, ge=0)
    """Maximum distance from a reference point that counts as a hit, in the reference's units."""

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return 2 * hits / (targets + predicted points), from 0 to 1; a target is hit once.

        Outcomes besides ok: `no_answer`, `too_many`, `too_long`.
        """
        from rollmill.rewards.vision.detections import read_points

        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        targets = read_targets(task.answer)
        if options.tolerance == 0 and any(target.kind == "point" for target in targets):
            raise ValueError("the task's answer is a point, which nothing hits with tolerance 0; give `tolerance`")
        across, down = scale_factors(options.coordinates, options.reference or options.coordinates, task.metadata)
        text = options.select_answer(completion)
        if text is not None and len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        found = None if text is None else await run_large_in_thread(len(text), read_points, text)
        if found is None:
            return Score(0.0, "no_answer")
        if len(found.places) > max_detections(len(targets)):
            return Score(0.0, "too_many")
        kept = [
            ((place[0] * across, place[1] * down), label)
            for place, label in zip(found.places, found.labels, strict=True)
            if place is not None
        ]
        corners = sum(len(target.corners) for target in targets)
        hits = (
            await run_large_in_thread(2 * corners * len(kept), _matched, options, targets, kept)
            if kept and targets
            else 0.0
        )
        shown = boxes_in_pixels(found.places, options.coordinates, task.metadata)
        return Score(f1_score(hits, len(targets), len(found.places)), boxes=shown)


def _matched(options: PointsReward, targets: Sequence[PointTarget], named: Sequence[tuple[Point, str | None]]) -> float:
    places = [place for place, _ in named]
    hits = np.array([target.hits(places, options.tolerance) for target in targets])
    if options.labels:
        hits &= labels_match([target.label for target in targets], [label for _, label in named])
    return max_matching_score(hits.astype(np.float64))


def read_targets(answer: Any) -> list[PointTarget]:
    """Parse the targets of the task's answer. Raises ValueError if it has none."""
    alone = _target(answer)
    entries = [alone] if alone is not None else [_target(entry) for entry in _list(answer)]
    if None in entries or (not entries and answer != []):
        raise ValueError(f"the task's answer is {answer!r:.80}; expected {_FORMS}")
    return [entry for entry in entries if entry is not None]


def _list(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, list | tuple) else []


def _target(entry: Any) -> PointTarget | None:
    if finite_numbers(entry, 2) is not None or finite_numbers(entry, 4) is not None:
        entry = {"point" if len(entry) == 2 else "box": entry}
    if not isinstance(entry, Mapping):
        return None
    label = entry.get("label")
    if not isinstance(label, str | None):
        return None
    if (place := parse_point(entry.get("point"))) is not None:
        return PointTarget("point", (place,), label)
    if (corners := parse_box(entry.get("box"), "xyxy")) is not None:
        return PointTarget("box", (corners[:2], corners[2:]), label)
    polygon = [parse_point(corner) for corner in _list(entry.get("polygon"))]
    if len(polygon) < 3 or None in polygon:
        return None
    return PointTarget("polygon", tuple(corner for corner in polygon if corner is not None), label)
