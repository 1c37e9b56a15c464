"""The boxes reward: F1 of the best matching between boxes."""

from __future__ import annotations

import numpy as np

from rollmill.config.rewards.vision import BoxesReward, GroundingReward
from rollmill.rewards.base import Box, Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread, select_answer
from rollmill.rewards.vision.detections import Detections, read_boxes, reference_boxes
from rollmill.rewards.vision.geometry import Point, boxes_in_pixels, giou, image_bounds, iou, scale_factors
from rollmill.rewards.vision.matching import Matrix, f1_score, labels_match, max_matching_score
from rollmill.types import Completion, Task


class BoxesScorer:
    """2 * (sum of the scores of matched pairs) / (reference boxes + predicted boxes), from 0 to 1.

    A box that is malformed or has no area counts as predicted and matches nothing. If the reference is the empty list,
    an empty list earns 1. Outcomes besides ok: `no_answer`, `too_many`, `too_long`.
    """

    def __init__(self, config: BoxesReward) -> None:
        self._config = config

    async def score(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Score(None)
        golds = reference_boxes(task.answer, config.reference_layout)
        across, down = scale_factors(config.coordinates, config.reference or config.coordinates, task.metadata)
        text = select_answer(completion, config)
        if text is not None and len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        found = None if text is None else await run_large_in_thread(len(text), read_boxes, text, config.layout)
        if found is None:
            return Score(0.0, "no_answer")
        if len(found.places) > max_detections(len(golds.places)):
            return Score(0.0, "too_many")
        scaled = [
            None if each is None else (each[0] * across, each[1] * down, each[2] * across, each[3] * down)
            for each in found.places
        ]
        named = Detections(found.style, scaled, found.labels)
        matched = await run_large_in_thread(2 * len(golds.places) * len(scaled), _matched, config, golds, named)
        shown = boxes_in_pixels(found.places, config.coordinates, task.metadata)
        return Score(f1_score(matched, len(golds.places), len(scaled)), boxes=shown)


def max_detections(golds: int) -> int:
    """Return the maximum number of predictions: with more, F1 is close to 0, and matching is slow."""
    return 100 + 3 * golds


def _matched(config: BoxesReward, golds: Detections[Box], named: Detections[Box]) -> float:
    return max_matching_score(pair_scores(config, golds, named))


def pair_scores(config: BoxesReward, golds: Detections[Box], named: Detections[Box]) -> Matrix:
    """Return the score of each pair of a reference and a predicted box with an area [G, P], from 0 to 1."""
    kept = [index for index, each in enumerate(named.places) if each is not None]
    gold_boxes = [each for each in golds.places if each is not None]
    boxes = [each for each in named.places if each is not None]
    overlap = iou(gold_boxes, boxes) if config.measure == "iou" else (1 + giou(gold_boxes, boxes)) / 2
    counts = (overlap > 0) & (overlap >= config.threshold)
    if config.labels:
        counts &= labels_match(golds.labels, [named.labels[index] for index in kept])
    return np.where(counts, 1.0 if config.credit == "hit" else overlap, 0.0)


# The grounding reward: checks the format of boxes, not their positions.


class GroundingScorer:
    """1 if there are as many boxes as required, each well formed, inside the image and labelled if required.

    Outcomes besides ok: `no_answer`, `wrong_number`, `wrong_syntax`, `malformed`, `outside`, `no_label`, `too_long`.
    """

    def __init__(self, config: GroundingReward) -> None:
        self._config = config

    async def score(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None:
            return Score(None)
        text = select_answer(completion, config)
        if text is None:
            return Score(0.0, "no_answer")
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        found = await run_large_in_thread(len(text), read_boxes, text, config.layout)
        if found is None:
            return Score(0.0, "no_answer") if config.fewest else Score(1.0)
        edges = image_bounds(config.coordinates, task.metadata)
        rules = {
            "wrong_number": config.fewest <= len(found.places) <= config.most,
            "wrong_syntax": config.syntax in ("any", found.style),
            "malformed": None not in found.places,
            "outside": all(_inside(place, edges) for place in found.places if place is not None),
            "no_label": not config.labels or all(found.labels),
        }
        broken = next((outcome for outcome, kept in rules.items() if not kept), None)
        shown = boxes_in_pixels(found.places, config.coordinates, task.metadata)
        return Score(1.0, boxes=shown) if broken is None else Score(0.0, broken, boxes=shown)


def _inside(box: Box, edges: Point | None) -> bool:
    return min(box) >= 0 and (edges is None or (box[2] <= edges[0] and box[3] <= edges[1]))
