"""Overlap of boxes, and what a point hits. Shapes: G reference places, P places of a completion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollmill.rewards.vision.coordinates import Box, Point

Matrix = npt.NDArray[np.float64]


def iou(golds: Sequence[Box], boxes: Sequence[Box]) -> Matrix:
    """Intersection over union [G, P], from 0 to 1. Boxes have an area."""
    intersection, union, _ = _areas(golds, boxes)
    return intersection / union


def giou(golds: Sequence[Box], boxes: Sequence[Box]) -> Matrix:
    """Generalised IoU [G, P] (arXiv:1902.09630, algorithm 1): IoU - (hull - union) / hull, from -1 to 1."""
    intersection, union, hull = _areas(golds, boxes)
    return intersection / union - (hull - union) / hull


def _areas(golds: Sequence[Box], boxes: Sequence[Box]) -> tuple[Matrix, Matrix, Matrix]:
    """Areas [G, P] of the intersection, the union and the smallest box around both."""
    one = np.asarray(golds, np.float64).reshape(-1, 1, 4)
    other = np.asarray(boxes, np.float64).reshape(1, -1, 4)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    intersection = np.clip(sides, 0, None).prod(-1)
    union = (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1) - intersection
    hull = (np.maximum(one[..., 2:], other[..., 2:]) - np.minimum(one[..., :2], other[..., :2])).prod(-1)
    return intersection, union, hull


def in_polygon(corners: Sequence[Point], points: Sequence[Point]) -> npt.NDArray[np.bool_]:
    """Which points [P] are inside a polygon, by the number of its edges to the right (even-odd rule)."""
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T[:, :, None]
    start = np.asarray(corners, np.float64)
    end = np.roll(start, -1, axis=0)
    above = (start[:, 1] > y) != (end[:, 1] > y)
    rise = np.where(end[:, 1] == start[:, 1], 1.0, end[:, 1] - start[:, 1])
    crossing = start[:, 0] + (y - start[:, 1]) * (end[:, 0] - start[:, 0]) / rise
    inside: npt.NDArray[np.bool_] = (above & (x < crossing)).sum(1) % 2 == 1
    return inside
