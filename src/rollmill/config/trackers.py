"""`monitor`: terminal output, logged files and the report, and trackers for metrics besides the run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, Section, module_sections, section_union


class TrackerSection(NamedSection):
    """A tracker chosen by name; its other keys are its options."""

    names: Literal["rollmill", "trl", "verl"] = "rollmill"
    """Whose names the metrics get: `trl` and `verl` add those of TRL or verl to rollmill's own."""

    def arguments(self) -> dict[str, Any]:
        """Returns the options of the tracker itself."""
        return {key: value for key, value in super().arguments().items() if key != "names"}


class TensorBoardSection(TrackerSection):
    """Writes event files to RUN/tensorboard (extra `tensorboard`)."""

    implementation = "rollmill.trackers.tensorboard:TensorBoardTracker"
    needs_extra = ("tensorboard", "tensorboard")
    name: Literal["tensorboard"] = "tensorboard"
    completions: int = Field(1, ge=0)
    """Number of sample completions to write as text at every step."""


class ServiceTrackerSection(TrackerSection):
    """A tracker of a service, which may be slow or unavailable, so that it runs in a thread of its own."""

    completions: int = Field(0, ge=0)
    """Number of sample completions to write as text at every step."""


class WandbSection(ServiceTrackerSection):
    """Weights & Biases (extra `wandb`). A resumed run continues the same run there; files are in RUN/wandb."""

    implementation = "rollmill.trackers.wandb:WandbTracker"
    needs_extra = ("wandb", "wandb")
    name: Literal["wandb"] = "wandb"
    project: str = "rollmill"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team. Default: that of the API key."""
    group: str | None = None
    """Group of runs that it belongs to."""
    tags: list[str] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` only writes RUN/wandb, which `wandb sync` uploads later."""


class MLflowSection(ServiceTrackerSection):
    """MLflow (extra `mlflow`). A resumed run continues the same run there."""

    implementation = "rollmill.trackers.mlflow:MLflowTracker"
    needs_extra = ("mlflow", "mlflow")
    name: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    """Tracking server or database, such as `http://localhost:5000` or `sqlite:///mlflow.db`. Default: MLflow's own,
    from `MLFLOW_TRACKING_URI`."""
    experiment: str = "rollmill"
    """Experiment that the run belongs to; it is made if it does not exist."""


class TrackioSection(ServiceTrackerSection):
    """trackio (extra `trackio`), which stores runs in a local database; `trackio show` opens its dashboard."""

    implementation = "rollmill.trackers.trackio:TrackioTracker"
    needs_extra = ("trackio", "trackio")
    name: Literal["trackio"] = "trackio"
    project: str = "rollmill"
    """Project that the run belongs to."""
    space: str | None = None
    """Hugging Face Space that shows the run, such as `user/space`. Default: only the local database."""


class SwanLabSection(ServiceTrackerSection):
    """SwanLab (extra `swanlab`). Files are in RUN/swanlog."""

    implementation = "rollmill.trackers.swanlab:SwanLabTracker"
    needs_extra = ("swanlab", "swanlab")
    name: Literal["swanlab"] = "swanlab"
    project: str = "rollmill"
    """Project that the run belongs to."""
    workspace: str | None = None
    """Workspace. Default: that of the API key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` only writes RUN/swanlog, which `swanlab sync` uploads later."""


class AimSection(ServiceTrackerSection):
    """Aim (extra `aim`), which stores runs in a repository on this machine or on a server; `aim up` opens its pages.
    A resumed run continues the same run there."""

    implementation = "rollmill.trackers.aim:AimTracker"
    needs_extra = ("aim", "aim")
    name: Literal["aim"] = "aim"
    repo: str | None = None
    """Folder of the repository, or `aim://HOST:PORT`. Default: Aim's own, the nearest folder with `.aim` from the
    working folder upwards, or the working folder."""
    experiment: str = "rollmill"
    """Experiment that the run belongs to."""


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
            sections.append(TensorBoardSection(completions=self.show_completions))
        return sections

    def extras(self) -> dict[str, tuple[str, str]]:
        return {"tensorboard": ("tensorboard", "tensorboard")} if self.tensorboard else {}
