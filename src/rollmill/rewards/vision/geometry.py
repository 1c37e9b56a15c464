"""Overlap of boxes, and points in polygons. Shapes: G reference boxes or points, P predicted ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.rewards.base import Box
from rollmill.rewards.vision.base import BoxLayout, Coordinates

# Coordinate systems: converts pixels, fractions, percent or thousandths to those of the reference.

Point = tuple[float, float]

_LARGEST = 1e7
_PER_UNIT = {"unit": 1.0, "percent": 100.0, "thousand": 1000.0}


def finite_number(value: Any) -> float | None:
    """Return a finite number of plausible size, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST <= value <= _LARGEST and not math.isnan(value) else None


def finite_numbers(values: Any, count: int) -> list[float] | None:
    """Return `count` finite numbers of plausible size, else None."""
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    found = [value for value in map(finite_number, values) if value is not None]
    return found if len(found) == count else None


def parse_point(values: Any) -> Point | None:
    """Return the point of two numbers, else None."""
    found = finite_numbers(values, 2)
    return None if found is None else (found[0], found[1])


def parse_box(values: Any, layout: BoxLayout) -> Box | None:
    """Return the box of four numbers; None if they are not four numbers, or the box has no area."""
    found = finite_numbers(values, 4)
    if found is None:
        return None
    one, two, three, four = found
    if layout == "xywh":
        three, four = one + three, two + four
    elif layout == "yxyx":
        one, two, three, four = two, one, four, three
    return (one, two, three, four) if one < three and two < four else None


def scale_factors(source: Coordinates, target: Coordinates, metadata: Mapping[str, Any]) -> Point:
    """Return the factors for x and y. Raises ValueError if the image's size is needed and unknown."""
    if source == target:
        return 1.0, 1.0
    size = image_size(metadata) if "pixels" in (source, target) else (1.0, 1.0)
    if size is None:
        raise ValueError(
            f"{source} cannot be converted to {target} without the image's size; give the task a column `image`, or "
            "`image_size` with [width, height]"
        )
    ends = [size if each == "pixels" else (_PER_UNIT[each], _PER_UNIT[each]) for each in (source, target)]
    return ends[1][0] / ends[0][0], ends[1][1] / ends[0][1]


def image_bounds(coordinates: Coordinates, metadata: Mapping[str, Any]) -> Point | None:
    """Return the right and lower edge of the image; None for pixels of an image of unknown size."""
    if coordinates == "pixels":
        return image_size(metadata)
    return _PER_UNIT[coordinates], _PER_UNIT[coordinates]


def image_size(metadata: Mapping[str, Any]) -> Point | None:
    """Return width and height in pixels, from the column `image_size` or the first image. Raises ValueError."""
    from rollmill.data.images import image_refs_of

    size = metadata.get("image_size")
    if size is None:
        images = image_refs_of(metadata)
        return (float(images[0].width), float(images[0].height)) if images else None
    sides = parse_point(size)
    if sides is None or min(sides) <= 0:
        raise ValueError(f"the task's column `image_size` is {size!r:.80}; expected [width, height] in pixels")
    return sides


_MOST_SHOWN = 20


def boxes_in_pixels(
    places: Sequence[Box | Point | None], coordinates: Coordinates, metadata: Mapping[str, Any]
) -> tuple[Box, ...]:
    """Return the first boxes or points of an answer in pixels, for display; none if the image's size is unknown."""
    try:
        across, down = scale_factors(coordinates, "pixels", metadata)
    except ValueError:
        return ()
    found = [each if len(each) == 4 else (*each, *each) for each in places if each is not None]
    return tuple((a * across, b * down, c * across, d * down) for a, b, c, d in found[:_MOST_SHOWN])


Matrix = npt.NDArray[np.float64]


def iou(golds: Sequence[Box], boxes: Sequence[Box]) -> Matrix:
    """Return the intersection over union [G, P], from 0 to 1. Boxes have an area."""
    intersection, union, _ = _areas(golds, boxes)
    return intersection / union


def giou(golds: Sequence[Box], boxes: Sequence[Box]) -> Matrix:
    """Return the generalised IoU [G, P] (arXiv:1902.09630, algorithm 1): IoU - (hull - union) / hull, from -1 to 1."""
    intersection, union, hull = _areas(golds, boxes)
    return intersection / union - (hull - union) / hull


def _areas(golds: Sequence[Box], boxes: Sequence[Box]) -> tuple[Matrix, Matrix, Matrix]:
    """Return the areas [G, P] of the intersection, the union and the smallest box around both."""
    one = np.asarray(golds, np.float64).reshape(-1, 1, 4)
    other = np.asarray(boxes, np.float64).reshape(1, -1, 4)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    intersection = np.clip(sides, 0, None).prod(-1)
    union = (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1) - intersection
    hull = (np.maximum(one[..., 2:], other[..., 2:]) - np.minimum(one[..., :2], other[..., :2])).prod(-1)
    return intersection, union, hull


def in_polygon(corners: Sequence[Point], points: Sequence[Point]) -> npt.NDArray[np.bool_]:
    """Return which points [P] are inside a polygon, by the number of its edges to the right (even-odd rule)."""
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T[:, :, None]
    start = np.asarray(corners, np.float64)
    end = np.roll(start, -1, axis=0)
    above = (start[:, 1] > y) != (end[:, 1] > y)
    rise = np.where(end[:, 1] == start[:, 1], 1.0, end[:, 1] - start[:, 1])
    crossing = start[:, 0] + (y - start[:, 1]) * (end[:, 0] - start[:, 0]) / rise
    inside: npt.NDArray[np.bool_] = (above & (x < crossing)).sum(1) % 2 == 1
    return inside
