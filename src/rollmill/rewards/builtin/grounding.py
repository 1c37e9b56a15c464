"""The grounding reward: checks the format of boxes, not their positions."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.rewards.base import Box, Score
from rollmill.rewards.text.parsing import MAX_TEXT_CHARS, run_large_in_thread
from rollmill.rewards.vision.base import BoxLayout, Coordinates, VisionReward
from rollmill.rewards.vision.geometry import Point, boxes_in_pixels, image_bounds
from rollmill.types import Completion, Task


class GroundingReward(VisionReward):
    """1 if the answer gives boxes in the right format; their location is not checked."""

    largest = 1.0
    name: Literal["grounding"]
    syntax: Literal["any", "json", "tags"] = "any"
    """`json`: objects with `bbox_2d`; `tags`: `<box>...</box>` or `<|box_start|>...<|box_end|>`."""
    coordinates: Coordinates = "pixels"
    """Unit of the numbers; boxes outside the image are wrong, if its size is known."""
    layout: BoxLayout = "xyxy"
    """Layout of the four numbers."""
    labels: bool = False
    """Require a label for each box."""
    fewest: int = Field(1, ge=0)
    """Minimum number of boxes."""
    most: int = Field(20, ge=1)
    """Maximum number of boxes."""

    @model_validator(mode="after")
    def _some_number_is_right(self) -> Self:
        if self.fewest > self.most:
            raise ValueError(f"fewest ({self.fewest}) is above most ({self.most}); lower it")
        return self

    async def score(self, task: Task, completion: Completion) -> Score:
        """Return 1 if there are as many boxes as required, each well formed, inside the image and labelled if
        required.

        Outcomes besides ok: `no_answer`, `wrong_number`, `wrong_syntax`, `malformed`, `outside`, `no_label`,
        `too_long`.
        """
        from rollmill.rewards.vision.detections import read_boxes

        options = self.of_task(task.metadata)
        if options is None:
            return Score(None)
        text = options.select_answer(completion)
        if text is None:
            return Score(0.0, "no_answer")
        if len(text) > MAX_TEXT_CHARS:
            return Score(0.0, "too_long")
        found = await run_large_in_thread(len(text), read_boxes, text, options.layout)
        if found is None:
            return Score(0.0, "no_answer") if options.fewest else Score(1.0)
        edges = image_bounds(options.coordinates, task.metadata)
        rules = {
            "wrong_number": options.fewest <= len(found.places) <= options.most,
            "wrong_syntax": options.syntax in ("any", found.style),
            "malformed": None not in found.places,
            "outside": all(_inside(place, edges) for place in found.places if place is not None),
            "no_label": not options.labels or all(found.labels),
        }
        broken = next((outcome for outcome, kept in rules.items() if not kept), None)
        shown = boxes_in_pixels(found.places, options.coordinates, task.metadata)
        return Score(1.0, boxes=shown) if broken is None else Score(0.0, broken, boxes=shown)


def _inside(box: Box, edges: Point | None) -> bool:
    return min(box) >= 0 and (edges is None or (box[2] <= edges[0] and box[3] <= edges[1]))
