"""`monitor`: terminal output, logged files and the report, and trackers for metrics besides the run directory."""

from __future__ import annotations

from pydantic import Field, TypeAdapter

from rollmill.config.components import TrackerConfig
from rollmill.config.section import Section
from rollmill.config.trackers import TrackerSection


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
    """Warn once when a stage shows zero reward, zero gradient or collapsed entropy in this many steps in a row: in the
    terminal, in RUN/events.jsonl and in the report. Not while the reward is nearly at its maximum."""
    stop_when_stuck: bool = False
    """Also end the stage then, like early stopping, with a checkpoint."""
    stop_on_mismatch: bool = True
    """End the run with an error if engine and trainer disagree in fp32 by more than .1 nats per token on average
    (`logprob_gap/mean`), with the same weights, in three steps in a row: that is more than rounding, so the model that
    is trained is not the one that was sampled from. With `false` the run only warns."""

    def all_trackers(self) -> list[TrackerSection]:
        """Returns the sections of all trackers, that of `tensorboard` included."""
        sections: list[TrackerSection] = list(self.trackers)
        if self.tensorboard and not any(each.name == "tensorboard" for each in sections):
            options = {"name": "tensorboard", "completions": self.show_completions}
            sections.append(TypeAdapter(TrackerConfig).validate_python(options))
        return sections

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"tensorboard": ("tensorboard", "tensorboard")} if self.tensorboard else {}
