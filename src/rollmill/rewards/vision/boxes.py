"""The boxes reward: F1 of the best matching between boxes."""

from __future__ import annotations

import numpy as np

from rollmill.config.rewards import BoxesReward
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import Verdict
from rollmill.rewards.text.reading import LONGEST_TEXT, aside, judged_part
from rollmill.rewards.vision.coordinates import Box, factors
from rollmill.rewards.vision.geometry import giou, iou
from rollmill.rewards.vision.matching import Matrix, f1, matched_sum, same_labels
from rollmill.rewards.vision.reading import Found, read_boxes, reference_boxes


class Boxes:
    """2 * (sum of what matched pairs count) / (boxes of the reference + boxes named), from 0 to 1.

    A box that is malformed or has no area is one that was named and matches nothing. Where the reference is the empty
    list, an empty list earns 1. Outcomes besides ok: `no_answer`, `too_many`, `too_long`.
    """

    def __init__(self, config: BoxesReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        config = self._config.of_task(task.metadata)
        if config is None or task.answer is None:
            return Verdict(None)
        golds = reference_boxes(task.answer, config.reference_layout)
        across, down = factors(config.coordinates, config.reference or config.coordinates, task.metadata)
        text = judged_part(completion.text, config)
        if text is not None and len(text) > LONGEST_TEXT:
            return Verdict(0.0, "too_long")
        found = None if text is None else await aside(len(text), read_boxes, text, config.layout)
        if found is None:
            return Verdict(0.0, "no_answer")
        if len(found.places) > most_places(len(golds.places)):
            return Verdict(0.0, "too_many")
        scaled = [
            None if each is None else (each[0] * across, each[1] * down, each[2] * across, each[3] * down)
            for each in found.places
        ]
        named = Found(found.style, scaled, found.labels)
        matched = await aside(2 * len(golds.places) * len(scaled), _matched, config, golds, named)
        return Verdict(f1(matched, len(golds.places), len(scaled)))


def most_places(golds: int) -> int:
    """How many places a completion may name: with more, F1 is next to nothing, and matching takes long."""
    return 100 + 3 * golds


def _matched(config: BoxesReward, golds: Found[Box], named: Found[Box]) -> float:
    return matched_sum(pair_scores(config, golds, named))


def pair_scores(config: BoxesReward, golds: Found[Box], named: Found[Box]) -> Matrix:
    """What each pair of a reference and a box with an area would count [G, P], from 0 to 1."""
    kept = [index for index, each in enumerate(named.places) if each is not None]
    gold_boxes = [each for each in golds.places if each is not None]
    boxes = [each for each in named.places if each is not None]
    overlap = iou(gold_boxes, boxes) if config.measure == "iou" else (1 + giou(gold_boxes, boxes)) / 2
    counts = (overlap > 0) & (overlap >= config.threshold)
    if config.labels:
        counts &= same_labels(golds.labels, [named.labels[index] for index in kept])
    return np.where(counts, 1.0 if config.credit == "hit" else overlap, 0.0)
