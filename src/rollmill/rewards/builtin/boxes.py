"""The boxes reward: F1 of the best matching between boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rollmill.rewards.base import Box, Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread
from rollmill.rewards.vision.base import BoxLayout, LocalizationReward
from rollmill.rewards.vision.geometry import boxes_in_pixels, giou, iou, scale_factors
from rollmill.rewards.vision.matching import Matrix, f1_score, labels_match, max_detections, max_matching_score
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.vision.detections import Detections


class BoxesReward(LocalizationReward):
    """F1 of bounding boxes: twice the overlap of the best one-to-one matching over the number of boxes on both
    sides."""

    largest = 1.0
    name: Literal["boxes"]
    measure: Literal["iou", "giou"] = "iou"
    """Overlap of two boxes: intersection over union, or generalised IoU (arXiv:1902.09630) as (1 + GIoU) / 2, which
    also distinguishes near from far."""
    threshold: float = Field(0.0, ge=0, le=1)
    """Pairs with less overlap do not match."""
    credit: Literal["overlap", "hit"] = "overlap"
    """Credit of a matched pair: its overlap, or 1."""
    layout: BoxLayout = "xyxy"
    """Layout of the completion's four numbers: two corners, corner and size, or two corners with y first."""
    reference_layout: BoxLayout = "xyxy"
    """Layout of the reference's numbers; COCO has `xywh`."""

    @model_validator(mode="after")
    def _hits_need_a_threshold(self) -> Self:
        if self.credit == "hit" and self.threshold == 0:
            raise ValueError("credit hit counts every pair that reaches threshold; give one, as in threshold: 0.5")
        return self

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return 2 * (sum of the scores of matched pairs) / (reference boxes + predicted boxes), from 0 to 1.

        A box that is malformed or has no area counts as predicted and matches nothing. If the reference is the empty
        list, an empty list earns 1. Outcomes besides ok: `no_answer`, `too_many`, `too_long`.
        """
        from rollmill.rewards.vision.detections import Detections, read_boxes, reference_boxes

        options = self.of_task(task.metadata)
        if options is None or task.answer is None:
            return Score(None)
        golds = reference_boxes(task.answer, options.reference_layout)
        across, down = scale_factors(options.coordinates, options.reference or options.coordinates, task.metadata)
        text = options.select_answer(completion)
        if text is not None and len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        found = None if text is None else await run_large_in_thread(len(text), read_boxes, text, options.layout)
        if found is None:
            return Score(0.0, "no_answer")
        if len(found.places) > max_detections(len(golds.places)):
            return Score(0.0, "too_many")
        scaled = [
            None if each is None else (each[0] * across, each[1] * down, each[2] * across, each[3] * down)
            for each in found.places
        ]
        named = Detections(found.style, scaled, found.labels)
        matched = await run_large_in_thread(2 * len(golds.places) * len(scaled), _matched, options, golds, named)
        shown = boxes_in_pixels(found.places, options.coordinates, task.metadata)
        return Score(f1_score(matched, len(golds.places), len(scaled)), boxes=shown)


def _matched(options: BoxesReward, golds: Detections[Box], named: Detections[Box]) -> float:
    return max_matching_score(pair_scores(options, golds, named))


def pair_scores(options: BoxesReward, golds: Detections[Box], named: Detections[Box]) -> Matrix:
    """Return the score of each pair of a reference and a predicted box with an area [G, P], from 0 to 1."""
    kept = [index for index, each in enumerate(named.places) if each is not None]
    gold_boxes = [each for each in golds.places if each is not None]
    boxes = [each for each in named.places if each is not None]
    overlap = iou(gold_boxes, boxes) if options.measure == "iou" else (1 + giou(gold_boxes, boxes)) / 2
    counts = (overlap > 0) & (overlap >= options.threshold)
    if options.labels:
        counts &= labels_match(golds.labels, [named.labels[index] for index in kept])
    return np.where(counts, 1.0 if options.credit == "hit" else overlap, 0.0)
