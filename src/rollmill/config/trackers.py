"""`monitor`: terminal output, logged files and the report, and trackers for metrics besides the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, Section, module_sections, section_union


class TrackerSection(NamedSection):
    """A tracker chosen by name; its other keys are its options."""


class TensorBoardSection(TrackerSection):
    """Writes event files to RUN/tensorboard (extra `tensorboard`)."""

    implementation = "rollmill.trackers.tensorboard:TensorBoardTracker"
    name: Literal["tensorboard"] = "tensorboard"
    completions: int = Field(1, ge=0)
    """Number of sample completions to write as text at every step."""


if TYPE_CHECKING:
    TrackerConfig = TrackerSection
else:
    TrackerConfig = section_union(module_sections(__name__, TrackerSection), kind="tracker")


class MonitorConfig(Section):
    """Terminal output, logged files and the report."""

    trackers: list[TrackerConfig] = []
    """Further places for the metrics: names or sections. RUN/metrics.jsonl is always written."""
    tensorboard: bool = False
    """The same as the tracker `tensorboard`."""
    show_completions: int = Field(1, ge=0)
    """Sample completions to show in the terminal."""
    rollouts_every: int = Field(1, ge=1)
    """Store the experiences of every Nth step under RUN/rollouts."""
    token_details: bool = True
    """With each stored experience, also store the trainer's log-prob (eight digits) and the entropy (five) of every
    token."""
    timeline_every: int = Field(10, ge=1)
    """Write the generation and reward times of each completion to RUN/timeline.jsonl, for the first and every Nth
    step."""
    report: bool = True
    """Write RUN/report.html at the end."""
    stuck_after: int = Field(20, ge=1)
    """Say loudly, once, when a stage shows zero reward, zero gradient or collapsed entropy in so many steps in a row:
    in the terminal, in RUN/events.jsonl and in the report. Not while the reward is nearly at its maximum."""
    stop_when_stuck: bool = False
    """Also end the stage then, like early stopping, with a checkpoint."""
