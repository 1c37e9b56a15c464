"""The grounding reward: boxes in the right form. It says nothing of whether they are the right ones."""

from __future__ import annotations

from rollmill.config.rewards import GroundingReward
from rollmill.rewards.base import Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread, select_text
from rollmill.rewards.vision.coordinates import Box, Point, image_bounds
from rollmill.rewards.vision.detections import read_boxes
from rollmill.types import Completion, Task


class GroundingScorer:
    """1 where there are as many boxes as asked for, each well formed, inside the picture and labelled where asked.

    Outcomes besides ok: `no_answer`, `wrong_number`, `wrong_syntax`, `malformed`, `outside`, `no_label`, `too_long`.
    """

    def __init__(self, config: GroundingReward) -> None:
        self._config = config

    async def judge(self, task: Task, completion: Completion) -> Score:
        config = self._config.of_task(task.metadata)
        if config is None:
            return Score(None)
        text = select_text(completion.text, config)
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
        return Score(1.0) if broken is None else Score(0.0, broken)


def _inside(box: Box, edges: Point | None) -> bool:
    return min(box) >= 0 and (edges is None or (box[2] <= edges[0] and box[3] <= edges[1]))
