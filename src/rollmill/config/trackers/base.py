"""Base class of trackers, and TensorBoard as one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.config.section import NamedSection


class TrackerSection(NamedSection):
    """A tracker chosen by name; its other keys are its options."""


class TensorBoardSection(TrackerSection):
    """Writes event files to RUN/tensorboard (extra `tensorboard`)."""

    implementation = "rollmill.trackers.tensorboard:TensorBoardTracker"
    name: Literal["tensorboard"] = "tensorboard"
    completions: int = Field(1, ge=0)
    """Number of sample completions to write as text at every step."""
