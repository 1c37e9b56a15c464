"""`rewards`: answers about images, compared with the task's reference answer; the rewards do not read the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from rollmill.config.rewards.text import TextReward

Coordinates = Literal["pixels", "unit", "percent", "thousand"]
BoxLayout = Literal["xyxy", "xywh", "yxyx"]


class VisionReward(TextReward):
    """Base of image rewards, which read the answer, without reasoning. A task's column `vision` may set a reward's own
    keys, under its name."""

    name: str

    def of_task(self, metadata: Mapping[str, Any]) -> Self | None:
        """Returns the settings of one task; None if its column `vision` names other rewards only.

        Raises ValueError if the column is not a mapping of rewards to settings.
        """
        column = metadata.get("vision")
        if column is None:
            return self
        if not isinstance(column, Mapping) or not all(isinstance(own, Mapping | None) for own in column.values()):
            raise ValueError(f"the task's column `vision` is {column!r:.80}; expected a mapping as in {{boxes: {{}}}}")
        if strange := sorted(column.keys() - VISION_NAMES):
            names = ", ".join(sorted(VISION_NAMES))
            raise ValueError(f"the task's column `vision` names {strange}; there are {names}")
        if self.name not in column:
            return None
        own = column[self.name] or {}
        allowed = type(self).model_fields.keys() - {"name", "weight", "clip", "gate", "after_steps", "timeout_reward"}
        if unknown := own.keys() - allowed:
            keys = ", ".join(sorted(allowed))
            raise ValueError(f"the task's column `vision` has {sorted(unknown)} under {self.name}; {keys} go there")
        return self.model_validate(self.model_dump() | own) if own else self


class LocalizationReward(VisionReward):
    """Base of rewards that compare locations in an image."""

    coordinates: Coordinates = "pixels"
    """Unit of the completion's coordinates: pixels, or 0 to 1, 100 or 1000 from edge to edge."""
    reference: Coordinates | None = None
    """Unit of the reference's coordinates. Default: as for the completion. If only one side uses pixels, the image size
    is needed: from a column `image`, or a column `image_size` with [width, height]."""
    labels: bool = True
    """If the reference has labels, only locations with the same label match."""


class BoxesReward(LocalizationReward):
    """F1 of bounding boxes: twice the overlap of the best one-to-one matching over the number of boxes on both
    sides."""

    implementation = "rollmill.rewards.vision.boxes:BoxesScorer"
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


class PointsReward(LocalizationReward):
    """F1 of points: each must hit a different location of the reference (a box, a polygon or a point)."""

    implementation = "rollmill.rewards.vision.points:PointsScorer"
    largest = 1.0
    name: Literal["points"]
    tolerance: float = Field(0.0, ge=0)
    """Maximum distance from a reference point that counts as a hit, in the reference's units."""


class CountReward(VisionReward):
    """1 if the number of the final answer equals the reference, else 0 or, with `credit: relative`, partial credit."""

    implementation = "rollmill.rewards.vision.count:CountScorer"
    decides = True
    largest = 1.0
    name: Literal["count"]
    credit: Literal["exact", "relative"] = "exact"
    """`relative`: 1 - |difference| / reference, at least 0."""


class OCRReward(VisionReward):
    """Similarity to the text of an image, by edit distance (extra `vision`); the best of several references counts."""

    needs_extra = ("vision", "rapidfuzz")
    implementation = "rollmill.rewards.vision.ocr:OCRScorer"
    decides = True
    largest = 1.0
    name: Literal["ocr"]
    measure: Literal["anls", "cer"] = "anls"
    """`anls` (arXiv:1905.13648): 1 - distance / length of the longer text, 0 below `threshold`. `cer`: 1 - distance /
    length of the reference, at least 0."""
    threshold: float = Field(0.5, ge=0, le=1)
    """Similarities below this count as 0, with both measures."""
    ignore_case: bool = True
    """Ignore upper and lower case."""
    ignore_spaces: bool = False
    """Ignore white space; otherwise any run of it counts as one space."""


class ChartReward(VisionReward):
    """Relaxed accuracy of ChartQA (arXiv:2203.10244): numbers within a tolerance, other text exactly."""

    implementation = "rollmill.rewards.vision.chart:ChartScorer"
    decides = True
    largest = 1.0
    name: Literal["chart"]
    tolerance: float = Field(0.05, ge=0, lt=1)
    """Accepted relative error of numbers."""
    exact_years: bool = True
    """Years (1900 to 2099) must match exactly. `false` is as published, where 1950 passes for 2019."""


class TableReward(VisionReward):
    """F1 of table cells, each identified by its row's first cell and its column's heading. Markdown, CSV or JSON."""

    implementation = "rollmill.rewards.vision.table:TableScorer"
    decides = True
    largest = 1.0
    name: Literal["table"]
    tolerance: float = Field(0.0, ge=0, lt=1)
    """Accepted relative error of numbers."""


class VQAReward(VisionReward):
    """VQA accuracy (arXiv:1505.00468): the fraction of annotators who agree, with full credit for three."""

    implementation = "rollmill.rewards.vision.vqa:VQAScorer"
    decides = True
    largest = 1.0
    name: Literal["vqa"]


class GroundingReward(VisionReward):
    """1 if the answer gives boxes in the right format; their location is not checked."""

    implementation = "rollmill.rewards.vision.boxes:GroundingScorer"
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


VISION_NAMES = frozenset(
    get_args(kind.model_fields["name"].annotation)[0]
    for kind in (
        BoxesReward,
        PointsReward,
        CountReward,
        OCRReward,
        ChartReward,
        TableReward,
        VQAReward,
        GroundingReward,
    )
)
"""Rewards that a column `vision` may name."""
