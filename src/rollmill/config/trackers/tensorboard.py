"""TensorBoard as a tracker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.trackers.base import TrackerSection


class TensorBoardSection(TrackerSection):
    """Writes event files to RUN/tensorboard (extra `tensorboard`)."""

    implementation = "rollmill.trackers.tensorboard:TensorBoardTracker"
    name: Literal["tensorboard"] = "tensorboard"
    completions: int = Field(1, ge=0)
    """Number of sample completions to write as text at every step."""
