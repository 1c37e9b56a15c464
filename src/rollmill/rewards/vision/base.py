"""Bases of the rewards for vision-language models, and the answers of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Self

from rollmill.config.rewards import built_in_rewards
from rollmill.config.section import section_tag
from rollmill.rewards.base import TextReward
from rollmill.types import Task

Coordinates = Literal["pixels", "unit", "percent", "thousand"]
BoxLayout = Literal["xyxy", "xywh", "yxyx"]


class VisionReward(TextReward):
    """Base of image rewards, which read the answer, without reasoning. A task's column `vision` may set a reward's own
    keys, under its name."""

    name: str

    def applies_to(self, task: Task) -> bool:
        column = task.metadata.get("vision")
        return not isinstance(column, Mapping) or self.name in column

    def of_task(self, metadata: Mapping[str, Any]) -> Self | None:
        """Return the settings of one task; None if its column `vision` names other rewards only.

        Raises ValueError if the column is not a mapping of rewards to settings.
        """
        column = metadata.get("vision")
        if column is None:
            return self
        if not isinstance(column, Mapping) or not all(isinstance(own, Mapping | None) for own in column.values()):
            raise ValueError(f"the task's column `vision` is {column!r:.80}; expected a mapping as in {{boxes: {{}}}}")
        known = vision_rewards()
        if strange := sorted(column.keys() - known):
            names = ", ".join(sorted(known))
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


@cache
def vision_rewards() -> frozenset[str]:
    """Return the names of the rewards that a column `vision` may name."""
    return frozenset(section_tag(each) for each in built_in_rewards() if issubclass(each, VisionReward))


def accepted_texts(answer: Any) -> list[str]:
    """Return the texts that a task's answer accepts: one, or a list. Raises ValueError if it is something else."""
    golds = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not golds or not all(isinstance(gold, str | int | float) and not isinstance(gold, bool) for gold in golds):
        raise ValueError(f"the task's answer is {answer!r:.80}; expected text, or a list of texts that are right")
    return [str(gold) for gold in golds]
